"""What `/openapi.json` says of refusals."""

from __future__ import annotations

import json

from penstock import errors
from penstock.server.http.openapi import Route, describe


async def _nothing(*_: object) -> None:
    pass


def _kinds(kind: type[errors.PenstockError]) -> list[type[errors.PenstockError]]:
    return [kind, *(each for below in kind.__subclasses__() for each in _kinds(below))]


def test_every_refusal_is_described() -> None:
    route = Route("GET", "/x", _nothing, "Nothing", {})
    answers = json.loads(describe([route]))["paths"]["/x"]["get"]["responses"]
    for kind in _kinds(errors.PenstockError):
        assert {str(kind.status), str(kind.anthropic[0])} <= set(answers), kind


def test_an_answer_that_names_a_header_has_it_described() -> None:
    route = Route("GET", "/x", _nothing, "Nothing", {})
    answers = json.loads(describe([route]))["paths"]["/x"]["get"]["responses"]
    assert set(answers["405"]["headers"]) == {"allow"}
    assert set(answers["503"]["headers"]) == set(answers["529"]["headers"]) == {"retry-after"}
