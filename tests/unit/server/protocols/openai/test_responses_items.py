"""Items and their log-probabilities, part by part."""

from __future__ import annotations

from penstock.server.protocols.openai.responses_items import OutputItems, response_of
from penstock.text.parts import CallArguments, CallBegin, CallEnd, Part, ReasoningDelta, TextDelta


def entries(text: str) -> list[dict[str, object]]:
    return [{"token": each, "bytes": [*each.encode()]} for each in text]


def told(items: OutputItems) -> str:
    messages = [item for item in items.items if item["type"] == "message"]
    return "".join(e["token"] for item in messages for e in item["content"][0]["logprobs"])


def test_text_behind_reasoning_in_one_step_keeps_its_log_probabilities() -> None:
    items = OutputItems()
    items.take_all([ReasoningDelta("hm"), TextDelta("We")], entries("hm</think>We"))
    items.take_all([TextDelta("ll.")], entries("ll."))
    items.finish()
    assert told(items) == "Well."


def test_text_around_a_call_in_one_step() -> None:
    call: list[Part] = [CallBegin("look"), CallArguments("{}"), CallEnd()]
    items = OutputItems()
    items.take_all([TextDelta("a"), *call, TextDelta("b")], entries('a<tool>{"x"}</tool>b'))
    items.finish()
    assert told(items) == "ab"


def test_an_item_leads_to_its_response() -> None:
    items = OutputItems(key="0a" * 24)
    items.take_all([ReasoningDelta("x"), TextDelta("y"), CallBegin("z"), CallEnd()], [])
    assert {response_of(item["id"]) for item in items.items} == {"resp_" + "0a" * 24}
    assert len({item["id"] for item in items.items}) == 3
    assert response_of("msg_1") is None
