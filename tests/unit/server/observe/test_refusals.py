"""Which refusals are kept, and what is said of them."""

from __future__ import annotations

from penstock.errors import BadRequest, ContextTooLong, Overloaded, Unauthorized
from penstock.server.observe.refusals import KEPT, Refusals

REQUEST = {"id": "r", "route": "/v1/completions", "model": "m", "key": "key 1"}


def test_those_for_lack_of_room_are_kept_with_what_would_have_fitted() -> None:
    refusals = Refusals()
    heard: list[dict[str, object]] = []
    refusals.on_add = heard.append
    numbers = {"reason": "window", "needed_tokens": 9, "limit_tokens": 4, "limit_bytes": 64}
    refusals.add(ContextTooLong("too long", numbers=numbers), REQUEST, 400)
    refusals.add(Overloaded("full", retry_after_s=3), REQUEST, 529)
    first, second = refusals.rows()
    assert heard == [first, second]
    assert first["fits"] == {"tokens": 4, "bytes": 64}
    assert (first["code"], first["numbers"], first["key"]) == (
        "context_length_exceeded", numbers, "key 1",
    )  # fmt: skip
    assert (second["status"], second["retry_after_s"]) == (529, 3)


def test_others_are_only_counted() -> None:
    refusals = Refusals()
    refusals.add(BadRequest("no"), REQUEST, 400)
    refusals.add(Unauthorized("no"), REQUEST, 401)
    assert refusals.rows() == []
    assert refusals.counts == {("invalid_request_error", ""): 1, ("invalid_api_key", ""): 1}


def test_a_probe_that_is_refused_is_only_counted() -> None:
    refusals = Refusals()
    refusals.add(Overloaded("loading"), {**REQUEST, "route": "/ready"}, 503)
    assert (refusals.rows(), refusals.counts) == ([], {("overloaded", ""): 1})


def test_the_oldest_are_forgotten() -> None:
    refusals = Refusals()
    for _ in range(2 * KEPT):
        refusals.add(Overloaded("full"), REQUEST, 503)
    assert len(refusals.rows()) == KEPT
    assert refusals.counts["overloaded", ""] == 2 * KEPT


def test_an_operator_who_is_refused_without_numbers_is_only_counted() -> None:
    refusals = Refusals()
    load = {**REQUEST, "route": "/admin/api/models/{id:path}/load"}
    refusals.add(Overloaded("The load was cancelled."), load, 503)
    assert refusals.rows() == []
    refusals.add(Overloaded("full", numbers={"reason": "memory"}), load, 503)
    assert len(refusals.rows()) == 1
