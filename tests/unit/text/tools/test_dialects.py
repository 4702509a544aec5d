"""Every dialect: what it reads, however the text is cut, and that nothing is lost."""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import TOOL_DIALECTS
from penstock.testing.grammar_hosts import limits, problem_of
from penstock.testing.tool_calls import ARGUMENTS, EXAMPLES, FRAGMENTS, HARMONY, TOOLS
from penstock.text.grammars.grammar import Grammar
from penstock.text.parsing import Parsing
from penstock.text.parts import CallArguments, CallBegin, CallEnd, ReasoningDelta, TextDelta, merged
from penstock.text.tools import DIALECTS, by_name, chosen_for
from penstock.text.tools.dialect import Marks, Tool

if TYPE_CHECKING:
    from penstock.text.parts import Part
    from penstock.text.tools.dialect import Dialect


def dialect_of(name: str) -> Dialect:
    dialect = by_name(name)
    assert dialect is not None
    return dialect


def parsed(dialect: Dialect, pieces: list[str]) -> list[Part]:
    parsing = Parsing(partial(dialect.parse, tools=TOOLS))
    parts = [part for piece in pieces for part in parsing.push(piece)]
    return merged([*parts, *parsing.finish()])


def calls(parts: list[Part]) -> list[tuple[str, Any]]:
    """Names and arguments; checks that each is opened, filled and closed in turn."""
    found: list[tuple[str, str]] = []
    open_call = False
    for part in parts:
        match part:
            case CallBegin(name):
                assert not open_call
                open_call = True
                found.append((name, ""))
            case CallArguments(text):
                assert open_call
                found[-1] = (found[-1][0], found[-1][1] + text)
            case CallEnd():
                assert open_call
                open_call = False
            case _:
                assert not open_call
    assert not open_call
    return [(name, json.loads(text)) for name, text in found]


def text_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextDelta))


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize(("name", "text", "before", "arguments"), EXAMPLES)
def test_calls_are_read(name: str, text: str, before: str, arguments: dict[str, Any]) -> None:
    parts = parsed(dialect_of(name), [text])
    assert calls(parts) == [("weather", arguments), ("time", {})]
    assert text_of(parts).strip() == before.strip()
    assert parts == parsed(dialect_of(name), list(text))


def test_channels_are_read() -> None:
    parts = parsed(dialect_of("harmony"), [HARMONY])
    assert parts[0] == ReasoningDelta("Let me think.")
    assert calls(parts) == [("weather", ARGUMENTS)]
    final = "<|channel|>final<|message|>Hello.<|return|>"
    assert parsed(dialect_of("harmony"), [final]) == [TextDelta("Hello.")]


def test_the_models_own_ids_are_kept() -> None:
    text = next(text for name, text, *_ in EXAMPLES if name == "kimi")
    begins = [part for part in parsed(dialect_of("kimi"), [text]) if isinstance(part, CallBegin)]
    assert [begin.id for begin in begins] == ["functions.weather:0", "functions.time:1"]


@pytest.mark.parametrize("name", [name for name, *_ in EXAMPLES if name in ("hermes", "deepseek")])
def test_arguments_come_as_they_are_written(name: str) -> None:
    text = next(text for each, text, *_ in EXAMPLES if each == name)
    parsing = Parsing(partial(dialect_of(name).parse, tools=TOOLS))
    half = text.index("Paris") + 3
    parts = parsing.push(text[:half])
    assert merged(parts)[-1] == CallArguments('{"city": "Par')


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "The tag <tool_call> opens and </tool_call> closes a call."),
        ("hermes", '<tool_call>\n{"name": "weather", "arg'),
        ("hermes", "<tool_call>{broken}</tool_call> and on"),
        ("hermes", "a <tool_call> b <tool_call"),
        ("qwen_coder", "if a <function=x and <parameter= then"),
        ("glm", "<tool_call>nobody\n<arg_key>a</arg_key></tool_call>"),
        ("minimax", '<minimax:tool_call>\n<invoke nam="x">'),
        ("deepseek", "<｜tool▁calls▁begin｜>what<｜tool▁calls▁end｜>"),
        ("kimi", "<|tool_calls_section_begin|> hm <|tool_call_begin|>x"),
        ("mistral", "[TOOL_CALLS] is a token; [TOOL_CALLS] [1, 2]"),
        ("llama_json", '{"answer": 42} is what you asked for'),
        ("llama_json", '{"name": "nobody", "parameters": {}}'),
        ("llama_json", '  {"name": "weather", "par'),
        ("pythonic", "[1, 2, 3] is a list; [weather is a name"),
        ("pythonic", "[weather(city=open('x'))]"),
        ("gemma", "<start_function_call>call:weather{city:<escape>Par"),
        ("gemma", "<|tool_call>nonsense<tool_call|>!"),
    ],
)
def test_what_is_no_call_is_text_to_the_last_character(name: str, text: str) -> None:
    assert parsed(dialect_of(name), [text]) == [TextDelta(text)]
    assert parsed(dialect_of(name), list(text)) == [TextDelta(text)]


fragments = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=2)), max_size=14)


@given(pieces=fragments, places=st.lists(st.integers(0, 200), max_size=8))
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_it_does_not_matter_how_the_text_is_cut(
    dialect: Dialect, pieces: list[str], places: list[int]
) -> None:
    text = "".join(pieces)
    whole = parsed(dialect, [text])
    assert whole == parsed(dialect, cut(text, places)) == parsed(dialect, list(text))
    if dialect.name != "harmony" and not any(isinstance(part, CallBegin) for part in whole):
        assert text_of(whole) == text


@given(places=st.lists(st.integers(0, 400), max_size=12))
@pytest.mark.parametrize(("name", "text"), [(n, t) for n, t, *_ in EXAMPLES])
def test_nor_for_whole_calls(name: str, text: str, places: list[int]) -> None:
    assert parsed(dialect_of(name), cut(text, places)) == parsed(dialect_of(name), [text])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|channel|>analysis<|message|>' }}", "harmony"),
        ("<｜tool▁call▁begin｜>", "deepseek"),
        ("<|tool_call_begin|>", "kimi"),
        ("<minimax:tool_call>", "minimax"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<start_function_call>", "gemma"),
        ("<tool_call>{name}<arg_key>", "glm"),
        ("<tool_call>\n<function=a>\n<parameter=b>", "qwen_coder"),
        ("<tool_call>", "hermes"),
        ("[func_name1(params_name1=params_value1", "pythonic"),
        ("<|python_tag|>", "llama_json"),
    ],
)
def test_a_template_tells_its_dialect(template: str, name: str) -> None:
    chosen = chosen_for(template)
    assert chosen is not None
    assert chosen.name == name


def test_every_dialect_can_be_set() -> None:
    assert tuple(dialect.name for dialect in DIALECTS) == TOOL_DIALECTS


def test_a_template_without_marks_tells_none() -> None:
    assert chosen_for("{{ messages }}") is None


def calls_grammar(name: str, schema: dict[str, Any]) -> str:
    """One call of the one tool `f`, whose arguments must be of this schema."""
    grammar, marks = Grammar(), Marks(lambda _: None)
    tool = Tool("f", {"type": "function", "function": {"name": "f"}}, schema, strict=True)
    rule = dialect_of(name).calls(grammar, [tool], 1, marks, "")
    grammar.start = f"{marks(rule.trigger)} {rule.after}"
    return grammar.text()


def allows(grammar: str, written: str) -> bool:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    return matcher.consume_tokens(tokenizer.tokenize_str(written)) and matcher.is_accepting()


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_a_grammar_does_not_outgrow_its_schema(dialect: Dialect) -> None:
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(30):
        nested = {"type": "array", "items": nested}
    wide = {f"option_{number}": {"type": "integer"} for number in range(2000)}
    for values, most in ({"a": nested}, 4_000), (wide, 400 * len(wide)):
        grammar = calls_grammar(dialect.name, {"type": "object", "properties": values})
        assert len(grammar) < most
        assert problem_of(grammar) is None


@pytest.mark.parametrize(
    ("name", "form", "comma"),
    [
        ("pythonic", "[f({})]", ", "),
        ("gemma", "<start_function_call>call:f{{{}}}<end_function_call>", ","),
    ],
)
def test_any_of_the_optional_arguments_may_be_left_out(name: str, form: str, comma: str) -> None:
    sign = "=" if name == "pythonic" else ":"
    values = {letter: {"type": "integer"} for letter in "abc"}
    grammar = calls_grammar(name, {"type": "object", "properties": values})
    for size in range(4):
        for letters in itertools.permutations("abc", size):
            written = form.format(comma.join(f"{letter}{sign}1" for letter in letters))
            assert allows(grammar, written) == (list(letters) == sorted(letters)), written


def test_lists_in_lists_are_held_to_their_form() -> None:
    rows = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
    grammar = calls_grammar("gemma", {"type": "object", "properties": {"a": rows}})
    form = "<start_function_call>call:f{{a:{}}}<end_function_call>"
    assert all(allows(grammar, form.format(rows)) for rows in ("[]", "[[]]", "[[1,2],[],[3]]"))
    assert not any(allows(grammar, form.format(rows)) for rows in ("[1]", "[[[]]]", "[[1],2]"))
