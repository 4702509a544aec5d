"""Chat templates: what Hugging Face templates use, what they may not do, what bounds them."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.errors import BadRequest, ModelUnusable
from penstock.server.pipeline.conversation import RENDER_FACTOR
from penstock.testing.tokenizers import byte_level
from penstock.text.template import ChatTemplate
from penstock.text.template_sandbox import Bounds, PromptTooLarge

HELLO = [{"role": "user", "content": "Hello <b> & é"}]
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    bounds = Bounds(max_chars=100_000, max_cpu_s=0.2)
    return ChatTemplate(source, bounds=bounds).render(messages or HELLO, **options)


def test_a_usual_template() -> None:
    expected = "<|im_start|>user\nHello <b> & é<|im_end|>\n"
    assert render(CHATML) == expected + "<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", "<s>||<pad>"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # trim_blocks and lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'b': '<é>', 'a': 1}|tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ {'b': '<é>'}|tojson(ensure_ascii=true) }}", '{"b": "<\\u00e9>"}'),
        ("{{ [1]|tojson(indent=2) }}", "[\n  1\n]"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}", "1"),
        ("{{ strftime_now('%Y-%m')|length }}", "7"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{% for m in messages * 2 %}{{ loop.index }}/{{ loop.length }} {% endfor %}", "1/2 2/2 "),
        ("{% for i in [1, 2, 3] if i != 2 %}{{ loop.last }} {% endfor %}", "False True "),
        ("{% for i in nothing %}x{% else %}none{% endfor %}", "none"),
        ("{{ 'a' ~ 1 ~ nothing ~ [2] }}", "a1[2]"),
        ("{{ messages[0]['content'].split(' ')[0]|trim ~ '%02d' % 3 }}", "Hello03"),
        ("{% macro show(n) %}{{ n }}{% endmacro %}{{ show(10000000) }}", "10000000"),
        ("{{ nothing|default(10000000) }}", "10000000"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
    ],
)
def test_what_templates_use(source: str, expected: str) -> None:
    template = ChatTemplate(source, bos_token="<s>", eos_token=None, extra={"pad_token": "<pad>"})
    assert template.render(HELLO) == expected


def test_arguments_reach_the_template_but_do_not_replace_ours() -> None:
    assert render("{{ enable_thinking }}", arguments={"enable_thinking": False}) == "False"
    with pytest.raises(BadRequest, match="'messages' is set by the server") as caught:
        render("", arguments={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_the_templates_own_refusal_is_quoted() -> None:
    with pytest.raises(BadRequest, match="refuses these messages: roles must alternate, not 2e99"):
        render("{{ raise_exception('roles must alternate, not 2e99') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.missing.field }}",
        "{{ 'x' + 1 }}",
        "{{ messages[0] + none }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ nothing() }}",
        "{{ namespace|tojson }}",
        "{% for message in none %}{% endfor %}",
    ],
)
def test_what_cannot_be_rendered_is_the_requests_fault(source: str) -> None:
    with pytest.raises(BadRequest, match=r"cannot render these messages: .+") as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
            "s of",
        ),
        ("{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}", "characters"),
        ("{{ range(1000000)|length }}", "MAX_RANGE"),
        ("{{ 'a' * 1000000000 }}", "characters"),
        ("{{ 1000000000 * [0] }}", "characters"),
        ("{% set ns = namespace(s='ab') %}" + "{% set ns.s = ns.s + ns.s %}" * 40, "characters"),
        ("{% set ns = namespace(s='ab') %}" + "{% set ns.s = ns.s ~ ns.s %}" * 40, "characters"),
        ("{% set ns = namespace(n=9) %}" + "{% set ns.n = ns.n * ns.n %}" * 40, "bits"),
        ("{{ 9 ** 1000000000 }}", "bits"),
        ("{{ 'a'|center(1000000000) }}", "over 100,000"),
        ("{{ 'a'.ljust(1000000000) }}", "over 100,000"),
        ("{{ '%1000000000d' % 1 }}", "width"),
        ("{{ '%*d' % (1000000000, 1) }}", "width"),
        ("{{ '%1000000000d'|format(1) }}", "width"),
        ("{{ '{:1000000000}'.format(1) }}", "width"),
        ("{{ lipsum(n=100) }}", "undefined"),
    ],
)
def test_work_and_size_are_bounded(source: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        render(source)


def test_deep_nesting_is_a_refusal() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(BadRequest, match="cannot render"):
        render("{{ messages[0].content|tojson }}", [{"content": nested}])


def test_each_rendering_has_its_own_allowance() -> None:
    template = ChatTemplate("{{ messages[0].content }}", bounds=Bounds(max_chars=10))
    chats = [[{"content": "12345678"}]] * 20
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(template.render, chats)) == {"12345678"}


GROWING = [
    "{% for _ in range(100) %}{{ messages[0].content }}{% endfor %}",
    "{{ messages[0].content ~ messages[0].content ~ messages[0].content }}",
    "{{ messages[0].content + messages[0].content + messages[0].content }}",
    "{% set much = messages[0].content * 100 %}",
    "{% set much = ([messages[0].content] * 100) | join %}",
    "{% set much = ','.join([messages[0].content] * 100) %}",
    "{% set much = messages[0].content.join(['a'] * 100) %}",
    "{% set much = (['a'] * 100) | join(messages[0].content) %}",
    "{% set much = messages[0].content | replace('a', messages[0].content) %}",
    "{% set much = messages[0].content | replace('a', 'bbbb') %}",
    "{% set much = messages[0].content.replace('a', 'bbbb') %}",
    "{% set much %}{{ messages[0].content }}{{ messages[0].content }}{% endset %}{{ much }}",
    "{% macro twice() %}{{ messages[0].content * 2 }}{% endmacro %}{{ twice() }}",
]


@pytest.mark.parametrize("source", GROWING)
def test_a_template_makes_no_more_than_there_is_room_for(source: str) -> None:
    template = ChatTemplate(source)
    messages = [{"content": "a" * 100_000}]
    tracemalloc.start()
    try:
        with pytest.raises(PromptTooLarge):
            template.render(messages, max_bytes=150_000)
        assert tracemalloc.get_traced_memory()[1] < RENDER_FACTOR * 150_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["a" * 100_000, "\N{GRINNING FACE}" * 100_000])
def test_a_prompt_takes_no_more_while_it_is_made_than_is_booked(text: str) -> None:
    template = ChatTemplate(GROWING[0])
    max_bytes = 0
    tracemalloc.start()
    try:
        while True:
            tracemalloc.reset_peak()
            try:
                template.render([{"content": text}], max_bytes=max_bytes)
            except PromptTooLarge:
                max_bytes += 4_000_000
            else:
                break
        assert tracemalloc.get_traced_memory()[1] < RENDER_FACTOR * max_bytes
    finally:
        tracemalloc.stop()


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(ModelUnusable, match="line 2"):
        ChatTemplate("ok\n{{ x }")


def test_from_tokenizer() -> None:
    assert ChatTemplate.from_tokenizer(byte_level()) is None
    sources = {"default": "plain {{ bos_token }}", "tool_use": "tools {{ tools|length }}"}
    template = ChatTemplate.from_tokenizer(byte_level(chat_templates=sources))
    assert template is not None
    assert template.render(HELLO) == "plain <|start|>"
    assert template.render(HELLO, tools=[{}, {}]) == "tools 2"
    assert template.render(HELLO, tools=[]) == "plain <|start|>"
