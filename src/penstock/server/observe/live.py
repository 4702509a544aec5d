"""The requests in hand: who can be shown and cancelled, by id."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.server.observe.progress import Progress


class LiveRequests:
    """Those of one server."""

    def __init__(self) -> None:
        self._requests: dict[str, Progress] = {}
        # Told of each that is over, and why if it failed.
        self.on_end: Callable[[Progress, BaseException | None], None] | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Progress]:
        return iter(tuple(self._requests.values()))

    @contextmanager
    def listed(self, request: Progress) -> Iterator[None]:
        """It is in hand until the block ends. Clients choose ids: of two alike the later counts."""
        self._requests[request.id] = request
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            if self.on_end is not None:
                self.on_end(request, failure)
            if self._requests.get(request.id) is request:
                del self._requests[request.id]

    def cancel(self, request_id: str) -> bool:
        """End it; False if it is not in hand."""
        request = self._requests.get(request_id)
        if request is not None:
            request.cancel()
        return request is not None
