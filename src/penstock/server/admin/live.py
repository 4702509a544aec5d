"""`/admin/api/requests`, `refusals`, `timeline`: who is served, who was not, what memory did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import UnknownRoute, shortened
from penstock.server.admin.views import request_rows
from penstock.server.observe.timeline import STEP_S

if TYPE_CHECKING:
    from penstock.server.http.exchange import Exchange
    from penstock.server.protocols.services import Services


async def live_requests(exchange: Exchange, services: Services) -> None:
    """Every request in hand."""
    await exchange.send_json(request_rows(services))


async def cancel_request(exchange: Exchange, services: Services) -> None:
    """End one of them."""
    request_id = exchange.path_params["id"]
    if not services.live.cancel(request_id):
        raise UnknownRoute(f"No request {shortened(request_id)!r} is in hand; it may have ended.")
    await exchange.send_json({"id": request_id, "cancelled": True})


async def refusals(exchange: Exchange, services: Services) -> None:
    """The latest refusals for lack of room."""
    await exchange.send_json(services.records.refusals.rows())


async def timeline(exchange: Exchange, services: Services) -> None:
    """Each domain's memory over the last quarter of an hour."""
    await exchange.send_json({"step_s": STEP_S, "points": services.records.timeline.points()})
