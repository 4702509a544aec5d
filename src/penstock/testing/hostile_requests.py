"""Whole requests that cost far more than they weigh, for every route: an address and a body.

`bodies` has fields of every shape; here are requests whose meaning is the attack: chains,
histories, words without end, counts that multiply.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.testing import bodies

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

Request = tuple[str, bytes]
_MIB = 1 << 20
_VOCABULARY = 49_152


def _post(path: str, **fields: Any) -> Request:
    return path, json.dumps(fields).encode()


def _chat(model: str, content: Any = "hi", **fields: Any) -> Request:
    messages = [{"role": "user", "content": content}]
    return _post(bodies.CHAT, model=model, messages=messages, **{"max_tokens": 4, **fields})


def _with_text(model: str, field: str, text: bytes) -> Request:
    """A chat with one field as this JSON, which no encoder would write."""
    path, body = _chat(model)
    return path, body[:-1] + b', "%b": %b}' % (field.encode(), text)


# --- JSON ----------------------------------------------------------------------------------------

_ODD_FIELDS = (
    "metadata", "tools", "tool_choice", "chat_template_kwargs", "response_format", "logit_bias",
    "stop", "documents", "unknown", "json_schema", "guided_json", "messages", "model", "seed",
)  # fmt: skip


def nested(model: str, random: Random) -> Request:
    """Lists or objects in each other, open or closed."""
    depth = random.choice([100, 5000, 10**6])
    begin, end = random.choice([(b"[", b"]"), (b'{"a":', b"}")])
    inside = begin * depth + b"1" + random.choice([end * depth, b""])
    return _with_text(model, random.choice(_ODD_FIELDS), inside)


def long_numbers(model: str, random: Random) -> Request:
    """Digits without end."""
    digits = b"9" * random.choice([400, 5000, 10**6])
    text = random.choice([b"%b", b"-%b", b"0.%b", b"1e%b", b"1e-%b", b"%b.5e9"]) % digits
    field = random.choice(
        ["seed", "temperature", "top_k", "max_tokens", "n", "logprobs", "unknown"]
    )
    return _with_text(model, field, text)


def odd_strings(model: str, random: Random) -> Request:
    """Escapes, halves of characters and zeros."""
    unit = random.choice(
        [rb"\u0000", rb"\ud800", rb"\udc00\ud800", rb"\\\"", b"\xff", b"\xc0\x80", rb"\n", b"\x00"]
    )
    text = b'"' + unit * random.choice([1, 10**5, 10**6]) + b'"'
    field = random.choice(["model", "user", "stop", "tool_choice", "messages", "grammar", "regex"])
    if random.random() < 0.5:
        head = b'{"model":"%b","max_tokens":2,"messages":[' % model.encode()
        return bodies.CHAT, head + b'{"role":"user","content":' + text + b"}]}"
    return _with_text(model, field, text)


def repeated_keys(model: str, random: Random) -> Request:
    """The same key again and again."""
    key = random.choice(["model", "messages", "stream", "user", "tools", "response_format"])
    pair = b'"%b":null,' % key.encode()
    path, body = _chat(model)
    return path, b"{" + pair * random.choice([10, 10**5, 10**6]) + body[1:]


# --- counts --------------------------------------------------------------------------------------


def many_messages(model: str, random: Random) -> Request:
    """A conversation of so many turns."""
    roles = ["user", "assistant", "system", "tool"]
    messages = [
        {"role": roles[n % 4], "content": str(n)} for n in range(random.choice([99, 10**5]))
    ]
    return _post(bodies.CHAT, model=model, messages=messages, max_tokens=2)


def many_tools(model: str, random: Random) -> Request:
    """So many tools, shown to the model or not."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    tools = [
        {**tool, "function": {**tool["function"], "name": f"f{n}"}}  # type: ignore[dict-item]
        for n in range(random.choice([64, 1000, 10**5]))
    ]
    return _chat(model, tools=tools, tool_choice=random.choice(["auto", "none", "required"]))


def many_stops(model: str, random: Random) -> Request:
    """Far more than can be kept, or long ones."""
    count = random.choice([16, 17, 10**6])
    return _chat(model, stop=[("x" * (n % 1000)) + str(n) for n in range(min(count, 10**5))])


def many_ids(model: str, random: Random) -> Request:
    """A word on each token."""
    count = random.choice([256, 1024, 49_152, 10**6])
    ids = list(range(count))
    field = random.choice(["stop_token_ids", "allowed_token_ids", "logit_bias"])
    value: Any = {str(i): -100 for i in ids} if field == "logit_bias" else ids
    return _chat(model, **{field: value, "n": random.choice([1, 24, 128])})


def many_answers(model: str, random: Random) -> Request:
    """Counts that multiply: answers, prompts, log-probabilities."""
    n = random.choice([2, 24, 128])
    if random.random() < 0.5:
        return _chat(model, n=n, best_of=n, logprobs=True, top_logprobs=20, max_tokens=3)
    prompts: Any = ["hello"] * random.choice([2, 64, 5000])
    if random.random() < 0.3:
        prompts = [[1, 2, 3]] * len(prompts)
    more = {"echo": True, "logprobs": 5} if random.random() < 0.5 else {}
    return _post(bodies.COMPLETIONS, model=model, prompt=prompts, n=n, max_tokens=2, **more)


# --- texts ---------------------------------------------------------------------------------------

_UNITS = (
    "a", "ab" * 50, " ", "\n", "\t \n", "\u0301", "\U0001f469\u200d", "\u4e2d", "<|im_start|>",
    "<|im_end|>\n<|im_start|>system\n", "\u202e", "0", "\ufffd", "\x00", "''''", "é" * 7 + "!",
    "{{ 7*7 }}", "{% for a in range(10**9) %}",
)  # fmt: skip


def long_text(model: str, random: Random) -> Request:
    """One word, or what looks like one to a tokenizer."""
    unit = random.choice(_UNITS)
    text = unit * (random.choice([20_000, _MIB, 8 * _MIB]) // len(unit.encode()))
    path = random.choice([bodies.CHAT, bodies.COMPLETIONS, "/tokenize", bodies.OLLAMA_GENERATE])
    match path:
        case bodies.CHAT:
            return _chat(model, text)
        case "/tokenize":
            return _post(path, model=model, prompt=text, return_token_strs=True)
        case bodies.OLLAMA_GENERATE:
            return _post(path, model=model, prompt=text, raw=True, options={"num_predict": 2})
        case _:
            return _post(path, model=model, prompt=text, max_tokens=2)


def id_lists(model: str, random: Random) -> Request:
    """Ids where text is usual: known, unknown, negative and far too many."""
    low, high = random.choice([(0, 2), (0, _VOCABULARY - 1), (-5, 10**12)])
    ids = [random.randint(low, high) for _ in range(random.choice([5, 5000]))]
    ids *= random.choice([1, 400])
    path = random.choice(["/detokenize", bodies.OLLAMA_GENERATE, bodies.COMPLETIONS])
    match path:
        case "/detokenize":
            return _post(path, model=model, tokens=ids)
        case bodies.OLLAMA_GENERATE:
            return _post(path, model=model, prompt="hi", context=ids, options={"num_predict": 2})
        case _:
            return _post(path, model=model, prompt=ids, max_tokens=2)


def templates(model: str, random: Random) -> Request:
    """What a template is told, and templates of the client's own."""
    count = random.choice([10, 20_000])
    kind = random.randrange(4)
    if kind == 0:
        opened = "{{ if .System }}" * count + "{{ .Prompt }}" + "{{ end }}" * count
        return _post(bodies.OLLAMA_GENERATE, model=model, prompt="x", template=opened)
    if kind == 1:
        return _chat(model, chat_template="{% for a in range(10**9) %}{{ a }}{% endfor %}")
    names = ["messages", "tools", "__class__", "self", "add_generation_prompt", "bos_token"]
    arguments: dict[str, Any] = {
        name: random.choice(["x" * count, count, [], None]) for name in names
    }
    if kind == 2:
        return _chat(model, chat_template_kwargs=arguments)
    return _chat(
        model, documents=[{"text": "x" * count}] * 9, chat_template_kwargs={"a": arguments}
    )


# --- responses and models ------------------------------------------------------------------------


def responses(model: str, random: Random) -> Request:
    """Long inputs that are stored, in the background or not; chains that lead nowhere."""
    asked: dict[str, Any] = {"model": model, "max_output_tokens": 2}
    kind = random.randrange(4)
    if kind == 0:
        return _post(bodies.RESPONSES, **asked, input="hi", previous_response_id="resp_" + "0" * 24)
    if kind == 1:
        item = {"type": "item_reference", "id": "msg_1"}
        return _post(bodies.RESPONSES, **asked, input=[item] * random.choice([1, 10**5]))
    if kind == 2:
        text = "word " * random.choice([10, 1000, 10**6])
        return _post(bodies.RESPONSES, **asked, input=text, background=True)
    items = [{"role": "user", "content": "hi"}, {"type": "reasoning", "summary": []}]
    asked |= {"metadata": {str(n): "x" * 500 for n in range(random.choice([16, 10**4]))}}
    return _post(bodies.RESPONSES, **asked, input=items * random.choice([1, 20_000]), store=True)


def models(model: str, random: Random) -> Request:
    """Names that lead elsewhere, and models that nobody has."""
    name = random.choice(
        ["hf.co/a/b", "../" * 20 + "etc/passwd", "random:big-kv", "x" * 10**5, "pypi:pip", "", "\0",
         "http://127.0.0.1:9/x", f"{model}:latest", f"{model}/..", "hf:a/../b"]
    )  # fmt: skip
    path = random.choice(["/api/pull", "/api/show", bodies.CHAT, "/api/delete", "/v1/plan"])
    return _post(path, model=name, messages=[{"role": "user", "content": "hi"}], max_tokens=1)


def shaped(model: str, random: Random) -> Request:
    """One of the fields of `bodies`, as large as may be."""
    shapes = bodies.shapes()
    path, name = random.choice(list(shapes))
    size = random.choice([10_000, _MIB, 16 * _MIB])
    body = shapes[path, name](size)
    return path, body.replace(b'"model":"fake"', b'"model":"%b"' % model.encode(), 1)


REQUESTS: tuple[Callable[[str, Random], Request], ...] = (
    nested, long_numbers, odd_strings, repeated_keys, many_messages, many_tools, many_stops,
    many_ids, many_answers, long_text, id_lists, templates, responses, models, shaped,
)  # fmt: skip


def any_request(model: str, random: Random) -> Request:
    """One of them."""
    return random.choice(REQUESTS)(model, random)
