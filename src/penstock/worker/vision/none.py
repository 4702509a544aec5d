"""What an executor asks of images, and how a model that takes none answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.errors import BadRequest

if TYPE_CHECKING:
    from penstock.wire import Failure, Submit
    from penstock.worker.core.plan import Plan
    from penstock.worker.models.batch import Batch


class Images(Protocol):
    """Images of requests that are here."""

    def add(self, request: Submit) -> None:
        """Take a request's images, if it has any; raises `PenstockError` to refuse it."""

    def remove(self, request_id: int) -> None:
        """Forget a request."""

    def ready(self, request_id: int) -> bool:
        """Whether it may be in plans, or never will."""

    def failure(self, request_id: int) -> Failure | None:
        """Why it cannot be answered."""

    @property
    def waits(self) -> bool:
        """An image is to be encoded, and there is room for its rows."""

    def work(self) -> None:
        """Encode the next one, if its rows have room."""

    def laid(self, batch: Batch, plan: Plan) -> Batch:
        """A batch with what its images make of it."""


class NoImages:
    """Of a model that takes none."""

    waits = False

    def __init__(self, why: str = "this model takes text only") -> None:
        self.why = why

    def add(self, request: Submit) -> None:
        """Refuse a request that has some."""
        if request.media:
            raise BadRequest(f"Images cannot be served: {self.why}.", param=request.media[0].where)

    def remove(self, request_id: int) -> None:
        """Nothing is kept of any."""

    def ready(self, request_id: int) -> bool:
        """Nobody waits."""
        return True

    def failure(self, request_id: int) -> Failure | None:
        """Nobody fails."""
        return None

    def work(self) -> None:
        """There is nothing to encode."""

    def laid(self, batch: Batch, plan: Plan) -> Batch:
        """As it is."""
        return batch
