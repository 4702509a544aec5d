"""Ollama's routes about models: which there are, which are loaded, what is known of one; and those
that this server does not offer.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from penstock import __version__, sampling
from penstock.catalog.scan import file_marks
from penstock.errors import BadRequest
from penstock.server.http.exchange import decode_json
from penstock.server.http.threads import read_files
from penstock.text.infill import infill_marks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.catalog import Card
    from penstock.server.http.exchange import Exchange
    from penstock.server.pipeline.model_texts import Text
    from penstock.server.protocols.services import Services
    from penstock.server.residency.model import Model

# The release of Ollama whose API these routes follow; clients refuse to talk to older ones.
OLLAMA_VERSION = "0.12.11"

_REMOVE = "models are folders under the models directory; remove the folder to delete a model"
NOT_OFFERED = {
    ("DELETE", "/api/delete"): _REMOVE,
    ("POST", "/api/copy"): "a further name is an alias in penstock.toml (models.NAME.alias)",
    ("POST", "/api/create"): "models are made by `penstock pull`; settings are in penstock.toml",
    ("POST", "/api/push"): "models are not published from here",
    ("POST", "/api/blobs/{digest}"): "models are made by `penstock pull`, not from uploads",
}
_QUANTISATIONS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_LICENSE_BYTES = 1 << 16
_LISTED = ("generate", "embed")  # Ollama has no routes for others
_FOR_EVER = datetime(2318, 1, 1, tzinfo=UTC)  # what their clients show as "Forever"


def refuser(sentence: str) -> Callable[[Exchange, Services], Awaitable[None]]:
    """An endpoint that says why there is none."""

    async def refuse(exchange: Exchange, services: Services) -> None:
        raise BadRequest(f"Not offered by this server: {sentence}.")

    return refuse


async def version(exchange: Exchange, services: Services) -> None:
    """Which of Ollama's releases this is like, and which of ours it is."""
    await exchange.send_json({"version": OLLAMA_VERSION, "penstock": __version__})


async def tags(exchange: Exchange, services: Services) -> None:
    """The models that generate text or make vectors."""

    def listed() -> list[dict[str, object]]:
        cards = services.reachable(services.catalog.scan())
        return [
            {**_model(card, name), "modified_at": _modified(card)}
            for card in cards
            if card.kind in _LISTED
            for name in (card.name, *services.settings(card).alias)
        ]

    await exchange.send_json({"models": await read_files((services.catalog, "tags"), listed)})


async def ps(exchange: Exchange, services: Services) -> None:
    """The models in memory, and until when."""
    loaded = list(services.residency.loaded_models().values())
    what = (services.catalog, "ps", *(model.name for model in loaded))
    rows = await read_files(what, lambda: [_model(m.card, m.name) for m in loaded if m.card])
    models = [
        {**row, **_residence(model, services)} for row, model in zip(rows, loaded, strict=True)
    ]
    await exchange.send_json({"models": models})


def _residence(model: Model, services: Services) -> dict[str, object]:
    grant = model.grant
    size = 0 if grant is None else grant.total_bytes
    on_gpu = grant is not None and not grant.domain.is_ram
    return {
        "size": size,
        "size_vram": size if on_gpu else 0,
        "context_length": services.context_now(model.name) or 0,
        "expires_at": _expiry(model, services).isoformat(),
    }


def _expiry(model: Model, services: Services) -> datetime:
    ttl_s = model.ttl_s(services.config.models.settings(model.name))
    if ttl_s is None or model.pinned:
        return _FOR_EVER
    idle_s = 0.0 if model.leases else time.monotonic() - model.used_at
    try:
        return datetime.now(UTC) + timedelta(seconds=ttl_s - idle_s)
    except OverflowError:
        return _FOR_EVER


class ShowFields(msgspec.Struct):
    """The body of `/api/show`."""

    model: str = ""
    name: str = ""  # what older clients call it
    verbose: bool | None = None


async def show(exchange: Exchange, services: Services) -> None:
    """What is known of one model."""
    async with exchange.body() as body:
        fields = await decode_json(msgspec.json.Decoder(ShowFields), body)
    card = await services.find(fields.model or fields.name)
    text = await services.text(card) if card.kind == "generate" else None
    template = None if text is None else text.tokenizer.chat_template
    parameters = _parameters(card, services)
    await exchange.send_json(
        {
            "license": await read_files((card.path, "license"), partial(_license, card)),
            "modelfile": "\n".join([f"FROM {card.name}", *map("PARAMETER {}".format, parameters)]),
            "parameters": "\n".join(parameters),
            "template": template or "",
            "system": "",
            "details": _details(card),
            "model_info": _info(card, services),
            "capabilities": _capabilities(card, text),
            "modified_at": _modified(card),
        }
    )


def _capabilities(card: Card, text: Text | None) -> list[str]:
    if text is None:
        return ["embedding"] if card.kind == "embed" else []
    found = ["completion"] if card.vision is None else ["completion", "vision"]
    if text.chat_format is not None:
        found += ["tools"] if text.chat_format.shows_tools else []
        found += ["thinking"] if text.chat_format.thinks else []
    return found + (["insert"] if infill_marks(text.tokenizer) is not None else [])


def _info(card: Card, services: Services) -> dict[str, object]:
    limit = services.settings(card).max_context or card.context
    own = {
        "context_length": min(card.context, limit),
        "embedding_length": card.encoder.dimensions if card.encoder else card.hidden_size,
        "block_count": len(card.layers),
        "vocab_size": card.vocab_size,
    }
    return {
        "general.architecture": card.model_type,
        "general.basename": card.name,
        "general.parameter_count": card.parameters,
        **{f"{card.model_type}.{name}": value for name, value in own.items()},
    }


def _parameters(card: Card, services: Services) -> list[str]:
    """What holds for a request that does not say: the settings', else the model's own."""
    settings, lines = services.settings(card), []
    names = {each.name: each.ollama for each in sampling.PARAMETERS if each.author}
    for name, shown in {**names, "max_tokens": "num_predict"}.items():
        value = getattr(settings, name)
        value = card.sampling_defaults.get(name) if value is None else value
        if value is not None:
            lines.append(f"{shown:<30} {value:g}")
    return lines


def _license(card: Card) -> str:
    for file in sorted(card.path.glob("LICENSE*")):
        try:
            with file.open("rb") as content:
                return content.read(_LICENSE_BYTES).decode("utf-8", "replace")
        except OSError:  # removed since
            continue
    return ""


def _model(card: Card, name: str) -> dict[str, object]:
    """Reads the marks of the model's files; blocking."""
    marks = file_marks(card.path)
    return {
        "name": name,
        "model": name,
        "size": card.weight_bytes,
        "digest": sha256(repr(marks).encode()).hexdigest(),
        "details": _details(card),
    }


def _details(card: Card) -> dict[str, object]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": card.model_type,
        "families": [card.model_type],
        "parameter_size": _parameter_size(card.parameters),
        "quantization_level": _level(card),
    }


def _level(card: Card) -> str:
    return ", ".join(card.formats) or _QUANTISATIONS.get(card.dtype, card.dtype)


def _parameter_size(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"


def _modified(card: Card) -> str:
    try:
        seconds = card.path.stat().st_mtime
    except OSError:  # removed since the scan
        seconds = 0.0
    return datetime.fromtimestamp(seconds, UTC).isoformat()
