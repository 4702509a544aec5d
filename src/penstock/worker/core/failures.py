"""How requests that fail are answered."""

from __future__ import annotations

from penstock.errors import BadRequest
from penstock.wire import Failure, Finish, Output


def unfollowed(why: str) -> Failure:
    """The answer cannot be held to its form."""
    return Failure(
        BadRequest.code, f"The answer cannot be held to its form any further: {why.rstrip('.')}."
    )


def failed(number: int, failure: Failure) -> Output:
    """The end of a request."""
    return Output(number, finish=Finish.ERROR, failure=failure)
