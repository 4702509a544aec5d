"""`penstock plan`: what fits of a model, asked of a running server or worked out here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import config
from penstock.catalog import Catalog, huggingface_cache
from penstock.cli import flags_of
from penstock.cli.remote import NoServer, connect, require_success
from penstock.cli.terminal import print_json, print_line, size

if TYPE_CHECKING:
    import argparse


def plan(options: argparse.Namespace) -> int:
    """Print what the model needs and what the memory allows."""
    try:
        answer = _ask(options)
    except NoServer:
        if options.url:
            raise
        answer = _work_out(options)
    if options.json:
        print_json(answer)
    else:
        for line in _lines(answer):
            print_line(line)
    return 0 if answer.get("fits", True) and answer["longest_context"] else 1


def _ask(options: argparse.Namespace) -> dict[str, Any]:
    wanted = {"context": options.context, "concurrency": options.concurrency}
    query = {"model": options.model, **{k: v for k, v in wanted.items() if v is not None}}
    with connect(options) as client:
        response = client.get("/admin/api/plan", params=query)
        require_success(response)
        answer: dict[str, Any] = response.json()
    return answer | {"source": "server"}


def _work_out(options: argparse.Namespace) -> dict[str, Any]:
    """As a server that is started now would: by estimates, with no other model loaded."""
    from penstock.memory.admission import largest_kv
    from penstock.memory.bookings import ProcessBooking
    from penstock.memory.clients.requests import floor_bytes
    from penstock.memory.domains import RAM, domain_of
    from penstock.memory.guard import open_books
    from penstock.memory.limits import FORK_SERVER_BYTES, SERVER_BYTES
    from penstock.memory.readings.gauge import read_gpus, read_ram, resolve_device
    from penstock.server.residency.load_estimate import estimate_load, fitting

    settings = config.load(options.config, flags=flags_of(options))
    catalog = Catalog(settings.model_dirs, settings.models.hf_cache or huggingface_cache())
    card, gpus = catalog.make(options.model), read_gpus()
    model = settings.models.settings(card.name)
    device = resolve_device(model.device, gpus)
    ledger = open_books(settings.memory, read_ram(), gpus)
    plan = estimate_load(card, model, device, ledger.snapshot()[domain_of(device)].limit_bytes)
    limit = ledger.snapshot()[RAM].limit_bytes
    for owner, estimate in (
        ("server", SERVER_BYTES),
        ("fork server", FORK_SERVER_BYTES),
        ("requests", floor_bytes(limit)),
    ):
        ProcessBooking(ledger, owner, estimate)
    capacity = plan.planned_capacity()
    kv_bytes = largest_kv(ledger.snapshot(), capacity, ())
    return plan.summary() | {
        **fitting(capacity, kv_bytes, options.context, options.concurrency),
        "loaded": False,
        "fixed_bytes": capacity.fixed_bytes,
        "limit_bytes": ledger.snapshot()[capacity.domain].limit_bytes,
        "source": "estimate",
    }


def _state(answer: dict[str, Any]) -> str:
    """What a model with recurrent layers keeps beside; "" of another."""
    each = answer["state_bytes_per_sequence"]
    return f" and {size(each)} of state a sequence" if each else ""


def _lines(answer: dict[str, Any]) -> list[str]:
    how = "measured" if answer["loaded"] else "estimated; a load measures it"
    stored = ", ".join([*answer["formats"], f"{size(answer['stored_bytes'])} stored"])
    lines = [
        f"{answer['model']} in {answer['dtype']} on {answer['device']}, within "
        f"{size(answer['limit_bytes'])} of {answer['domain']}:",
        f"  {size(answer['weight_bytes'])} weights ({stored}), {size(answer['fixed_bytes'])} with "
        f"the process and the largest step ({how})",
    ]
    if not answer["kv_groups"]:
        return [*lines, f"  no KV: each text, up to {answer['window']} tokens, is computed whole"]
    lines += [
        f"  {size(answer['kv_bytes'])} for KV in {answer['kv_dtype']} at "
        f"{size(answer['kv_bytes_per_token'])} a token of {answer['context']}{_state(answer)}",
        f"  longest context: {answer['longest_context']} of {answer['window']} tokens",
        f"  at once: {answer['concurrency_at_context']} sequences of {answer['context']} tokens",
    ]
    if "context_at_concurrency" in answer:
        each = answer["context_at_concurrency"]
        lines.append(f"  with {answer['concurrency']} at once: {each} tokens each")
    if "fits" in answer:
        verdict = "fits" if answer["fits"] else "does not fit"
        lines.append(f"  what was asked for needs {size(answer['needed_bytes'])} and {verdict}")
    return lines
