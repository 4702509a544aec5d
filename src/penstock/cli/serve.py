"""`penstock serve`: start the server and say so in one line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock import config
from penstock.cli import flags_of
from penstock.cli.terminal import print_line, size

if TYPE_CHECKING:
    import argparse

    from penstock.server.run import Started


def serve(options: argparse.Namespace) -> int:
    """Serve until stopped."""
    settings = config.load(options.config, flags=flags_of(options))
    from penstock.server import logs, run  # the slow imports, after the quick refusals

    logs.configure(settings.server.log_level, settings.server.log_file)
    run.run(settings, lambda started: _announce(started, settings, as_json=options.json))
    return 0


def _announce(started: Started, settings: config.Config, *, as_json: bool) -> None:
    if as_json:
        content = {
            "url": started.url,
            "models": started.models,
            "limits": {str(domain): limit for domain, limit in started.limits.items()},
            "device": started.device,
            "default": settings.models.default,
            "guard": started.guard,
        }
        print_line(json.dumps(content))
        return
    limits = ", ".join(f"{domain} {size(limit)}" for domain, limit in started.limits.items())
    print_line(
        f"Penstock serves {len(started.models)} model(s) at {started.url} "
        f"on {started.device} within {limits}. {_next_step(started, settings)}"
    )


def _next_step(started: Started, settings: config.Config) -> str:
    model = settings.models.default or next(iter(started.models), None)
    if model is None:
        return "There is no model yet; `penstock pull smollm2` fetches a first one."
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    key = " -H 'authorization: Bearer KEY'" if settings.server.api_keys else ""
    return (
        f"Try: curl {started.url}/v1/chat/completions{key} "
        f"-H 'content-type: application/json' -d '{json.dumps(body)}'"
    )
