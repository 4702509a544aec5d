"""The style of a refusal and the methods of an address follow from the table of routes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from starlette.routing import Match

from penstock.server.http.errors import ANTHROPIC, OLLAMA, OPENAI, ErrorStyle
from penstock.server.routes import ROUTES, rows_at, style_of

if TYPE_CHECKING:
    from penstock.server.http.openapi import Route


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_a_route_refuses_in_its_own_style(route: Route) -> None:
    path = re.sub(r"\{[^}]*\}", "x", route.path)
    assert style_of(path) is route.styles[0]
    assert style_of(path, anthropic=True) is route.styles[-1]


@pytest.mark.parametrize(
    ("path", "style"),
    [
        ("/v1/messages/batches", ANTHROPIC),
        ("/v1/messages/batches/1/results", ANTHROPIC),
        ("/v1/messagesbatches", OPENAI),
        ("/api/nothing", OLLAMA),
        ("/api", OLLAMA),
        ("/v1/embeddings", OPENAI),
        ("/v1", OPENAI),
        ("/nothing", OPENAI),
        ("/", OPENAI),
        ("*", OPENAI),
        ("", OPENAI),
    ],
)
def test_an_unknown_address_refuses_as_its_neighbours_do(path: str, style: ErrorStyle) -> None:
    assert style_of(path) is style


def test_two_protocols_share_the_list_of_models() -> None:
    for path in ("/v1/models", "/v1/models/a/b"):
        assert (style_of(path), style_of(path, anthropic=True)) == (OPENAI, ANTHROPIC)


@pytest.mark.parametrize("path", sorted({route.path for route in ROUTES}))
def test_an_address_has_the_methods_of_its_rows(path: str) -> None:
    scope = {"type": "http", "method": "NONE", "path": re.sub(r"\{[^}]*\}", "x", path)}
    found = [
        method
        for pattern, _ in rows_at(scope["path"])
        if pattern.matches(scope)[0] is Match.PARTIAL
        for method in (pattern.methods or set()) - {"HEAD"}
    ]
    assert sorted(found) == sorted(route.method for route in ROUTES if route.path == path)
