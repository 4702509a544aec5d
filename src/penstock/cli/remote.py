"""Talking to a running server, with sentences for when that fails."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx

from penstock import config
from penstock.errors import PenstockError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


class RemoteError(PenstockError):
    """The server cannot be reached or has refused."""


class NoServer(RemoteError):  # noqa: N818 - named for what is the case
    """Nobody listens there."""


@contextmanager
def connect(options: argparse.Namespace) -> Iterator[httpx.Client]:
    """A client for the server that `--url`, `--api-key` and the settings point to. An admin key
    opens everything, so that is the one taken from the settings if there is one."""
    settings = config.load(options.config).server
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    # An address to listen on everywhere is none to connect to.
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    url = options.url or f"http://{host}:{settings.port}"
    key = options.api_key or next(iter(settings.admin_keys + settings.api_keys), None)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(
            base_url=url, headers=headers, timeout=httpx.Timeout(10, read=None)
        ) as client:
            yield client
    except httpx.ConnectError:
        raise NoServer(
            f"There is no server at {url}. Start one with `penstock serve`, or name another "
            "with --url."
        ) from None
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise RemoteError(f"The server at {url} cannot be used: {error}.") from None


def require_success(response: httpx.Response) -> None:
    """Raise the server's own sentence for an answer that is an error."""
    if response.is_success:
        return
    response.read()
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    raise RemoteError(f"The server answered {response.status_code}: {message}")
