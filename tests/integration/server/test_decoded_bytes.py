"""What a body takes while it is made into a prompt is never more than is booked for it."""

from __future__ import annotations

import gc
import json
import tracemalloc
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.catalog import Catalog
from penstock.config import ModelSettings
from penstock.errors import BadRequest, PenstockError
from penstock.memory.clients.json_weight import MAX_OBJECTS, MAX_STRINGS, decoded_bytes
from penstock.server.pipeline.conversation import Conversation, _render
from penstock.server.pipeline.model_texts import Text, _read
from penstock.server.protocols.anthropic.fields import MessagesFields
from penstock.server.protocols.ollama.fields import OllamaChatFields, OllamaGenerateFields
from penstock.server.protocols.openai import chat, completions, responses
from penstock.testing import bodies
from penstock.testing.fake_server import add_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.catalog import Card

# Shows all there is of a message.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.reasoning_content %}{{ m.reasoning_content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c | tojson }}</call>{% endfor %}<|end|>"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{{ documents | tojson }}"
)
# Objects that are made once whatever the body, and an allocator's rounding up.
SPARE = 24 << 10
_TRIES = 3  # what other threads of this process allocate meanwhile is counted too

_KINDS: dict[str, Any] = {
    bodies.CHAT: chat.decoder,
    bodies.COMPLETIONS: completions.decoder,
    bodies.RESPONSES: responses.decoder,
    bodies.MESSAGES: msgspec.json.Decoder(MessagesFields),
    bodies.OLLAMA_CHAT: msgspec.json.Decoder(OllamaChatFields),
    bodies.OLLAMA_GENERATE: msgspec.json.Decoder(OllamaGenerateFields),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Card, Text]:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "fake", template=TEMPLATE)
    card = Catalog([home / "models"], home / "none").find("fake")
    return card, _read(card, None)


def convert(model: tuple[Card, Text], route: str, body: bytes) -> object:
    """Everything that is done with a body up to the tokenizer; all of it is held until the end."""
    fields = _KINDS[route].decode(body)
    asked: Conversation
    if route == bodies.COMPLETIONS:
        fields.check()
        return fields, fields.prompts(1024, 1 << 30), fields.sampling({}, 1 << 30, None)
    if route == bodies.RESPONSES:
        fields.check()
        asked = fields.conversation_after([])
        stored = msgspec.json.encode(fields.items())
    else:
        asked = fields.conversation()
        stored = b""
    asked.fields.check()
    sampling = asked.fields.sampling({}, 1 << 30, None)
    return fields, stored, sampling, _render(*model, asked, ModelSettings())


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that Python's allocators held for it."""
    gc.disable()  # or it would take longer than the rest
    tracemalloc.start()
    try:
        with suppress(PenstockError, msgspec.MsgspecError, UnicodeDecodeError):
            work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()


def check(model: tuple[Card, Text], route: str, body: bytes) -> None:
    """A body that is not refused for its shape takes no more than is booked."""
    try:
        booked = decoded_bytes(body)
    except BadRequest:
        return
    for _ in range(_TRIES):
        used = peak_bytes(lambda: convert(model, route, body)) + len(body)
        if used <= booked + SPARE:
            return
    pytest.fail(f"{used} of {booked} bytes: {used / booked:.2f}")


SHAPES = bodies.shapes()


@pytest.mark.parametrize("key", SHAPES, ids=" ".join)
def test_no_shape_takes_more_than_is_booked(model: tuple[Card, Text], key: tuple[str, str]) -> None:
    check(model, key[0], SHAPES[key](60_000))


_TEXT = st.text(st.sampled_from('a0{}[]",:\\ \né中\U0001f600'), max_size=40)
_VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(_TEXT, inner, max_size=8),
    max_leaves=20,
)
_PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": _TEXT}), max_size=6)
_CALL = st.fixed_dictionaries(
    {
        "id": _TEXT,
        "function": st.fixed_dictionaries(
            {
                "name": _TEXT,
                "arguments": _VALUE.map(lambda value: msgspec.json.encode(value).decode()),
            }
        ),
    }
)
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": _TEXT | _PARTS},
    optional={"tool_calls": st.lists(_CALL, max_size=4), "reasoning_content": _TEXT},
)


@settings(
    max_examples=30,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to make it smaller takes minutes
)
@given(
    messages=st.lists(_MESSAGE, min_size=1, max_size=6),
    extra=st.dictionaries(
        st.sampled_from(["chat_template_kwargs", "tools", "documents", "unknown", "stop"]), _VALUE
    ),
    repeats=st.sampled_from([1, 20, 100]),
    ascii_only=st.booleans(),
)
def test_no_chat_takes_more_than_is_booked(
    model: tuple[Card, Text],
    messages: list[Any],
    extra: dict[str, Any],
    repeats: int,
    ascii_only: bool,
) -> None:
    body = json.dumps(
        {"model": "fake", "messages": messages * repeats, **extra},
        ensure_ascii=ascii_only,
        separators=(",", ":"),
    )
    check(model, bodies.CHAT, body.encode("utf-8", "replace"))


def test_more_objects_than_anybody_needs_are_refused_before_they_are_made() -> None:
    make = SHAPES[bodies.CHAT, "messages"]
    size = len(make(1000)) * MAX_OBJECTS // 20
    with pytest.raises(BadRequest, match=f"more than {MAX_OBJECTS} objects"):
        decoded_bytes(make(size))
    spaced = make(size).replace(b'{"', b'{ \n"')
    with pytest.raises(BadRequest, match=f"more than {MAX_OBJECTS} objects"):
        decoded_bytes(spaced)


def test_more_strings_than_anybody_needs_are_refused_before_they_are_made() -> None:
    body = b'{"stop":[' + b",".join([b'""'] * (MAX_STRINGS + 10)) + b"]}"
    with pytest.raises(BadRequest, match=f"more than {MAX_STRINGS} strings"):
        decoded_bytes(body)


@pytest.mark.parametrize("text", [b'{\\"a\\": 1}, ', b"{ } [ ] , : ", b"\\\\", b"\\n{"])
def test_marks_in_a_text_are_no_objects(text: bytes) -> None:
    body = b'{"messages":[{"role":"user","content":"' + text * 400_000 + b'"}]}'
    assert decoded_bytes(body) > len(body)
