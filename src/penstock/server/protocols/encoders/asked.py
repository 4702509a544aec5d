"""What requests for vectors and scores have in common: the model, how texts are read, bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import BadRequest
from penstock.server.pipeline.encoding.texts import Reading
from penstock.server.pipeline.front_door import FrontDoor

if TYPE_CHECKING:
    from penstock.catalog import Card
    from penstock.catalog.encoders import Encoder
    from penstock.server.http.exchange import Exchange
    from penstock.server.protocols.services import Services

WHOLE_WINDOW = -1  # of `truncate_prompt_tokens`: as many as the model takes


@dataclass(frozen=True, slots=True)
class AskedModel:
    """The model of a request."""

    card: Card
    encoder: Encoder
    window: int  # the longest text that it takes, as far as is known now
    priority: int

    def dimensions(self, wanted: int | None) -> int:
        """Of a vector; refuses more than there are."""
        if wanted is None:
            return self.encoder.default_dimensions
        if not 1 <= wanted <= self.encoder.dimensions:
            raise BadRequest(
                f"`dimensions` is {wanted}; vectors of {self.card.name} have "
                f"{self.encoder.dimensions}, and fewer may be asked for.",
                param="dimensions",
            )
        return wanted


async def asked_model(
    exchange: Exchange, services: Services, name: str | None, kind: str, priority: int | None
) -> AskedModel:
    """The model that is asked; refuses one of another kind."""
    card = await services.of_kind(name, kind)
    assert card.encoder is not None
    exchange.record["model"] = card.name
    settings = services.settings(card)
    window = services.residency.capacity_of(card).window
    given = settings.priority if priority is None else priority
    return AskedModel(card, card.encoder, window, given or 0)


async def reading(
    exchange: Exchange, services: Services, model: AskedModel, field: str, cut: int | None
) -> Reading:
    """How its texts become tokens; `cut`: to how many, where longer ones are cut."""
    text = await services.text(model.card)
    door = FrontDoor(services, model.card, exchange.memory, field)
    most = model.window if cut == WHOLE_WINDOW else cut
    return Reading(door, text.tokenizer, model.window, most)


def check_cut(cut: int | None, param: str) -> None:
    """Refuse a number of tokens to which nothing can be cut."""
    if cut is not None and cut != WHOLE_WINDOW and cut < 1:
        raise BadRequest(
            f"`{param}` is {cut}; it is a number of tokens, or -1 for the model's window.",
            param=param,
        )
