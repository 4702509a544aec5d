"""llama.cpp's grammars: what they allow, what is refused and where."""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
import regex
from hypothesis import given, reject
from hypothesis import strategies as st

from penstock.errors import BadRequest
from penstock.testing.grammar_hosts import checked_grammar, limits
from penstock.testing.hostile_grammars import (
    GRAMMARS,
    gbnf_backwards,
    gbnf_blanks,
    gbnf_recursion,
    gbnf_rules,
)
from penstock.text.grammars.gbnf import GbnfError, is_gbnf
from penstock.text.grammars.gbnf_lark import to_lark
from penstock.text.grammars.grammar import MAX_FORMAT_BYTES, Format

if TYPE_CHECKING:
    from collections.abc import Callable

JSON = r"""
# A document: an object or a list.
root ::= object | list
value ::= object | list | text | number | ("true" | "false" | "null") gap
object ::=
  "{" gap (
    text ":" gap value
    ("," gap text ":" gap value)*
  )? "}" gap
list ::= "[" gap (value ("," gap value)*)? "]" gap
text ::= "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # an escape
  )* "\"" gap
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? gap
gap ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""
root  ::= (sum "=" gap term "\n")+
sum   ::= term ([-+*/] term)*
term  ::= name | number | "(" gap sum ")" gap
name  ::= [a-z] [a-z0-9_]* gap
number ::= [0-9]+ gap
gap   ::= ([ \t\n] gap)?
"""
LIST = r"""
root ::= point+
# The line end is part of the point.
point ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
CHESS = r"""
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")*
move ::= (pawn | piece | castle) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBQR])?
castle ::= "O-O" "-O"?
"""
C = r"""
root ::= (function)*
function ::= type " " name "(" (type " " name)? ")" " {" gap statement* "}" gap
type ::= "int" | "float" | "char"
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
statement ::= (
    ( type " " name " = " sum ";" gap ) |
    ( "return " sum ";" gap ) |
    ( "while (" sum " " ("<=" | "<" | "==") " " sum ") {" gap statement* "}" gap ) |
    ( "//" [^\n]* "\n" )
  )
sum ::= product (" " [-+] " " product)*
product ::= factor (" " ("*" | "/") " " factor)*
factor ::= name | [0-9]+ | "-" factor | "(" sum ")" | name "(" (sum (", " sum)*)? ")"
gap ::= ([ \t\n]+)
"""
EXAMPLES = [
    (JSON, ['{"a": [1, -2.5e3, {"b": null}],\n  "c": ""}', "[]", '["\\u00e9"]'], ["{a: 1}", "1"]),
    (ARITHMETIC, ["a = 1\n", "(x_1 +2) *3= 9\ny =2\n"], ["a = \n", "1 + = 2\n"]),
    (LIST, ["- one\n", "- é\n- two\n"], ["one\n", "- a", "- \n"]),
    (CHESS, ["1. e4 e5\n2. Nf3 Nc6\n10. O-O exd8=Q+\n"], ["1. e9 e5\n", "2. e4 e5\n"]),
    (
        C,
        ["int f(int x) { int y = x * -(2 + g(3, y)); while (x <= 2) { // no\n}\nreturn y; }\n"],
        ["int f(int x) { y = 1; }", "int f() {}"],
    ),
]


def allows(lark: str, text: str) -> bool:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    grammar = LLMatcher.grammar_from_lark(lark)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"), EXAMPLES, ids=["json", "arithmetic", "list", "chess", "c"]
)
def test_well_known_grammars(grammar: str, good: list[str], bad: list[str]) -> None:
    lark = to_lark(grammar)
    assert all(allows(lark, text) for text in good)
    assert not any(allows(lark, text) for text in bad)
    assert checked_grammar(Format("grammar", grammar))


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (r'root ::= "a\x41\u00e9\U0001F600\n\t\"\\"', ['aAé😀\n\t"\\'], ["aA"]),
        ("root ::= [^a-c\\]-]", ["d", "\n", "é"], ["a", "b", "]", "-"]),
        ("root ::= [-a] [a-] [\\x30-\\x39] .", ["--5\n", "aa0é"], ["b-5x"]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2} "d"{,1}', ["aab", "aabbccd"], ["ab", "aabccc"]),
        ('root ::= ("a" | "b")+ "a"', ["aa", "ba", "abba"], ["a", "ab"]),
        ('root ::= "x" |\n  "y"\n  | "z"\nother ::= "q"', ["x", "y", "z"], ["q"]),
        ('root ::= a-b a_b\na-b ::= "1"\na_b ::= "2"', ["12"], ["1"]),
        ('root ::= "" | "a" root', ["", "aaa"], ["b"]),
        ('root ::= "(" root ")" | ""', ["", "(())"], ["(()"]),
        ('root ::= ("a" # one\n | "b")?', ["", "a", "b"], ["ab"]),
        ('root ::= x "!"\nx ::= "a" x | y\ny ::= [0-9]+', ["aa12!", "0!"], ["a!", "aa"]),
        ("root ::= [a-z]+ [a-z]", ["ab", "abc"], ["a"]),
        ('root ::= "a/b" [/] r\nr ::= "" | "(" r ")"', ["a/b/", "a/b/()"], ["a/b"]),
        ('root ::= x "b"\nx ::= "(" x ")" | [a-c]+', ["(ab)b", "abb"], ["(ab)", "b"]),
    ],
)
def test_what_the_notation_means(grammar: str, good: list[str], bad: list[str]) -> None:
    lark = to_lark(grammar)
    assert all(allows(lark, text) for text in good)
    assert not any(allows(lark, text) for text in bad)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('rot ::= "a"', "no rule named root"),
        ("root ::= a", "line 1, column 10: the rule 'a' is defined nowhere"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule 'root' is defined twice"),
        ('root ::= (\n  "a"', "line 1, column 10: this bracket is never closed"),
        ('root ::= "a', 'line 1, column 10: " is never closed'),
        ("root ::= [a", r"line 1, column 10: \[ is never closed"),
        ("root ::= []", "without characters"),
        ("root ::= [b-a]", "before its beginning"),
        (r'root ::= "\q"', r"\\q is no escape"),
        (r'root ::= "\x4"', "2 hexadecimal digits"),
        (r'root ::= "\uD800"', "no character"),
        ('root ::= "a"{3,2}', "at least 3 and at most 2"),
        ('root ::= "a"{x}', "a repetition is"),
        ('root ::= "a"{99999}', "more than 2000"),
        ('root ::= "a" ) "b"', r"'\)' is not expected"),
        ("root ::= <think>", "tokens"),
        ('root ::= "a" root', "'root' of the grammar never ends"),
        ('root ::= "z" | a\na ::= "x" b\nb ::= "y" a', "'a' of the grammar never ends"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "nested more than 32"),
        ('root ::= "a"' + "*" * 9, "repetitions of the same thing"),
    ],
)
def test_what_cannot_be_read_says_where(grammar: str, words: str) -> None:
    with pytest.raises(GbnfError, match=words):
        to_lark(grammar)
    with pytest.raises(BadRequest, match=words) as refusal:
        checked_grammar(Format("grammar", grammar, "grammar"))
    assert refusal.value.param == "grammar"


def test_lark_is_told_from_gbnf() -> None:
    assert is_gbnf("# root\n  root   ::=  x")
    assert is_gbnf("root\n::= x")
    assert not is_gbnf('start: "::=" a\na: /x ::= y/')


def test_a_grammar_that_doubles_with_every_rule_is_bounded() -> None:
    rules = [f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40)]
    began = time.process_time()
    lark = to_lark("\n".join(["root ::= r0", *rules, 'r40 ::= "a"']))
    assert len(lark) < 100_000
    groups = 'root ::= a\na ::= "' + "x" * 8000 + '"\n' + "b ::= " + '(a "y") | ' * 20_000 + '"z"'
    with pytest.raises(GbnfError, match="comes to over 4194304 characters"):
        to_lark(groups)
    chain = "\n".join(["root ::= r0", *(f"r{n} ::= r{n + 1}" for n in range(4000))])
    assert to_lark(chain + '\nr4000 ::= "a"') == "start: /a/"
    assert time.process_time() - began < 10


@pytest.mark.parametrize("make", [gbnf_blanks, gbnf_backwards, gbnf_recursion, gbnf_rules])
def test_the_largest_grammars_are_read_in_a_moment(make: Callable[[int], Any]) -> None:
    grammar = make(GRAMMARS[make])["grammar"]
    assert len(grammar) <= MAX_FORMAT_BYTES
    began = time.process_time()
    with contextlib.suppress(GbnfError):
        to_lark(grammar)
    assert time.process_time() - began < 5


def test_a_rule_that_never_ends_is_found_wherever_it_stands() -> None:
    ends = 'root ::= a | "x"\na ::= (b "y")* root\nb ::= a{0} c\nc ::= root{2} | ""\n'
    assert "start" in to_lark(ends)
    for rule in ('d ::= "x" d', "d ::= d | e d\ne ::= [a]", "d ::= (d | e)+\ne ::= d{1,3}"):
        with pytest.raises(GbnfError, match="'d' of the grammar never ends"):
            to_lark(f"{ends}{rule}\n")


names = st.sampled_from(["root", "a", "b"])
atoms = st.one_of(
    st.sampled_from(['"x"', '"yz"', "[a-c]", "[^x]", '""', "a", "b", '"|"']),
)


@st.composite
def bodies(draw: st.DrawFn, depth: int = 2) -> str:
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        nested = depth and draw(st.booleans())
        body = f"({draw(bodies(depth - 1))})" if nested else draw(atoms)
        parts.append(body + draw(st.sampled_from(["", "", "*", "+", "?", "{1,2}"])))
    return draw(st.sampled_from([" ", " | "])).join(parts)


@given(root=bodies(), a=bodies(), text=st.text("xyzabc|!", max_size=6))
def test_a_grammar_without_recursion_allows_what_its_expression_does(
    root: str, a: str, text: str
) -> None:
    """Against another engine's regular expressions, into which this part of GBNF can be written."""
    b = '"b" [a-c]'
    a = a.replace("a-c", "A-C").replace("a", "b").replace("A-C", "a-c")
    lark = to_lark(f"root ::= {root}\na ::= {a}\nb ::= {b}")

    def expression(body: str, inner: dict[str, str]) -> str:
        pieces = re.findall(r'"[^"]*"|\[[^\]]*\]|[ab]|[^"\[ab]', body)
        return "".join(_python(piece, inner) for piece in pieces)

    b_rule = expression(b, {})
    a_rule = expression(a, {"b": b_rule})
    whole = expression(root, {"a": a_rule, "b": b_rule})
    try:
        wanted = regex.fullmatch(whole, text, regex.DOTALL, timeout=1)
    except TimeoutError:  # repetitions of repetitions: it tries all ways to divide the text
        reject()
    assert allows(lark, text) == (wanted is not None)


def _python(piece: str, inner: dict[str, str]) -> str:
    if piece.startswith('"'):
        return f"(?:{re.escape(piece[1:-1])})"
    if piece in inner:
        return f"(?:{inner[piece]})"
    return "" if piece == " " else piece
