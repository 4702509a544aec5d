"""Large request bodies of every shape that has cost more than it weighs, for every protocol.

Each is about as long as asked for and made of as many pieces of one kind as fit. Whether a server
takes or refuses one is not said here: only that it must do so within what it has booked, and
without holding others up.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

Shape = Callable[[int], bytes]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"

_HEADS = {
    CHAT: b'"messages":[{"role":"user","content":"hi"}]',
    COMPLETIONS: b'"prompt":"hi"',
    RESPONSES: b'"input":"hi"',
    MESSAGES: b'"max_tokens":4,"messages":[{"role":"user","content":"hi"}]',
    OLLAMA_CHAT: b'"messages":[{"role":"user","content":"hi"}]',
    OLLAMA_GENERATE: b'"prompt":"hi"',
}
_LIMITS = {RESPONSES: b'"max_output_tokens":4', MESSAGES: b'"max_tokens":4'}


def _fill(piece: bytes, size: int) -> bytes:
    """A list's inside: one piece again and again."""
    return ((piece + b",") * max(1, size // (len(piece) + 1)))[:-1]


def _keys(size: int) -> bytes:
    """An object's inside: short keys, all different."""
    pairs: list[bytes] = []
    length = 0
    for number in count():
        pairs.append(b'"%x":1' % number)
        length += len(pairs[-1]) + 1
        if length >= size:
            return b",".join(pairs)
    raise AssertionError


def _escaped(text: bytes) -> bytes:
    return text.replace(b"\\", b"\\\\").replace(b'"', b'\\"')


def _with(route: str, field: str, value: Callable[[int], bytes]) -> Shape:
    """A small request with one large field beside its own."""
    head = _HEADS[route]
    name = field.encode()
    return lambda size: b'{"model":"fake",' + head + b',"' + name + b'":' + value(size) + b"}"


def _instead(route: str, field: str, value: Callable[[int], bytes]) -> Shape:
    """A request whose messages or prompt are the large thing."""
    limit = _LIMITS.get(route, b'"max_tokens":4')
    name = field.encode()
    return lambda size: b'{"model":"fake",' + limit + b',"' + name + b'":' + value(size) + b"}"


def _list(piece: bytes) -> Callable[[int], bytes]:
    return lambda size: b"[" + _fill(piece, size) + b"]"


def _message(before: bytes, after: bytes, inside: Callable[[int], bytes]) -> Callable[[int], bytes]:
    return lambda size: b'[{"role":"user","content":"hi"},' + before + inside(size) + after + b"]"


def _text(unit: bytes) -> Callable[[int], bytes]:
    return lambda size: b'"' + unit * max(1, size // len(unit)) + b'"'


_ANY: dict[str, Callable[[int], bytes]] = {
    "short keys": lambda size: b"{" + _keys(size) + b"}",
    "nested lists": _list(b"[[]]"),
    "numbers": _list(b"1"),
    "floats": _list(b"0.1"),
    "strings": _list(b'""'),
    "objects": _list(b'{"a":{}}'),
    "zeros": _text(b"0"),
    "digits": lambda size: b"1" + b"0" * size,
    "escapes": _text(b"\\u00e9"),
}
_TEXTS = {
    "text": _text(b"a "),
    "quotes": _text(b'\\"'),
    "braces": _text(b"{[,"),
    "escapes": _text(b"\\u00e9"),
    "wide": lambda size: b'"' + "\U0001f600".encode() + b"a" * size + b'"',
    "all wide": _text("\u4e2d".encode()),
}


def shapes() -> dict[tuple[str, str], Shape]:
    """By route and name."""
    found: dict[tuple[str, str], Shape] = {}
    loose = {
        CHAT: ("chat_template_kwargs", "metadata", "tools", "response_format", "logit_bias",
               "stop", "stop_token_ids", "allowed_token_ids", "tool_choice", "unknown",
               "documents", "bad_words", "modalities", "model", "guided_json", "guided_choice"),
        COMPLETIONS: ("prompt", "logit_bias", "stop_token_ids", "unknown", "structured_outputs"),
        RESPONSES: ("metadata", "tools", "tool_choice", "text", "unknown", "conversation",
                    "previous_response_id"),
        MESSAGES: ("metadata", "tools", "tool_choice", "unknown", "system", "stop_sequences",
                   "thread"),
        OLLAMA_CHAT: ("options", "tools", "format", "keep_alive", "unknown"),
        OLLAMA_GENERATE: ("options", "images", "keep_alive", "system", "suffix"),
    }  # fmt: skip
    for route, fields in loose.items():
        for field in fields:
            for name, value in _ANY.items():
                maker = _instead if field == "prompt" else _with
                found[route, f"{field}: {name}"] = maker(route, field, value)
    for name, text in _TEXTS.items():
        for route in (CHAT, MESSAGES, OLLAMA_CHAT):
            inside = _message(b'{"role":"user","content":', b"}", text)
            found[route, f"one message: {name}"] = _instead(route, "messages", inside)
        found[COMPLETIONS, f"prompt: {name}"] = _instead(COMPLETIONS, "prompt", text)
        found[RESPONSES, f"input: {name}"] = _instead(RESPONSES, "input", text)
    # Without a question the model is only loaded or unloaded.
    found[OLLAMA_CHAT, "nothing but zeros"] = lambda size: (
        b'{"model":"fake","keep_alive":' + _text(b"0")(size) + b"}"
    )
    return found | _conversations()


def _conversations() -> dict[tuple[str, str], Shape]:
    pieces = {
        CHAT: {
            "messages": _list(b'{"role":"user","content":""}'),
            "wide messages": _list('{"role":"user","content":"\u4e2d"}'.encode()),
            "parts": _message(
                b'{"role":"user","content":', b"}", _list(b'{"type":"text","text":""}')
            ),
            "calls": _message(
                b'{"role":"assistant","tool_calls":', b"}", _list(b'{"function":{"name":"f"}}')
            ),
            "arguments": _message(
                b'{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"',
                b'"}}]}',
                lambda size: _escaped(b"{" + _keys(size * 2 // 3) + b"}"),
            ),
            "argument lists": _message(
                b'{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"',
                b'"}}]}',
                lambda size: _escaped(b'{"a":[' + _fill(b"[]", size) + b"]}"),
            ),
        },
        MESSAGES: {
            "messages": _list(b'{"role":"user","content":"a"}'),
            "blocks": _message(
                b'{"role":"user","content":', b"}", _list(b'{"type":"text","text":""}')
            ),
            "results": _message(
                b'{"role":"user","content":',
                b"}",
                _list(b'{"type":"tool_result","tool_use_id":"","content":""}'),
            ),
            "inputs": _message(
                b'{"role":"assistant","content":',
                b"}",
                _list(b'{"type":"tool_use","id":"","name":"f","input":{"a":1}}'),
            ),
            "one input": _message(
                b'{"role":"assistant","content":[{"type":"tool_use","id":"","name":"f","input":{',
                b'}}]},{"role":"user","content":"a"}',
                _keys,
            ),
        },
        OLLAMA_CHAT: {
            "messages": _list(b'{"role":"user"}'),
            "calls": _message(
                b'{"role":"assistant","tool_calls":', b"}", _list(b'{"function":{"name":"f"}}')
            ),
            "one call": _message(
                b'{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{',
                b"}}}]}",
                _keys,
            ),
        },
    }
    found = {
        (route, name): _instead(route, "messages", value)
        for route, values in pieces.items()
        for name, value in values.items()
    }
    items = {
        "items": b'{"role":"user","content":""}',
        "reasoning": b'{"type":"reasoning","content":[{"text":"a"}]}',
        "answers": b'{"role":"assistant","content":"a"}',
        "calls": b'{"type":"function_call","name":"f","call_id":""}',
        "outputs": b'{"type":"function_call_output","call_id":"","output":""}',
        "parts": b'{"role":"user","content":[{"type":"input_text","text":""}]}',
    }
    found |= {
        (RESPONSES, name): _instead(RESPONSES, "input", _list(piece))
        for name, piece in items.items()
    }
    return found
