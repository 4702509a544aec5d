"""Streaming equals one-shot decoding, for every family of tokenizer and any tokens."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.testing.tokenizers import FAMILIES, SPECIALS, byte_level
from penstock.text.stream import StopFinder, TextStream, stop_strings

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

family = cache(lambda name: FAMILIES[name]())
families = pytest.mark.parametrize("name", FAMILIES)


@cache
def tokenizer() -> Tokenizer:
    return byte_level()


def ids_of(kind: Tokenizer) -> st.SearchStrategy[list[int]]:
    # Ids below and above the vocabulary included: models have padded ones.
    return st.lists(st.integers(-1, kind.vocab_size + 2), max_size=40)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    return (min(found)[0], min(found)[2]) if found else None


def stream_in_pieces(stream: TextStream, ids: list[int], sizes: list[int]) -> str:
    text, rest = "", ids
    for size in sizes:
        text += stream.push(rest[:size])
        rest = rest[size:]
    return text + stream.push(rest) + stream.finish()


@families
@given(data=st.data(), skip=st.booleans(), sizes=st.lists(st.integers(0, 5), max_size=10))
def test_pieces_are_the_one_shot_decode(
    name: str, data: st.DataObject, skip: bool, sizes: list[int]
) -> None:
    kind = family(name)
    ids = data.draw(ids_of(kind))
    stream = TextStream(kind, skip_special_tokens=skip)
    assert stream_in_pieces(stream, ids, sizes) == kind.decode(ids, skip_special_tokens=skip)
    assert not stream.stopped


@families
@given(data=st.data(), sizes=st.lists(st.integers(0, 5), max_size=10))
def test_text_ends_at_the_first_stop_string(
    name: str, data: st.DataObject, sizes: list[int]
) -> None:
    kind = family(name)
    ids = data.draw(ids_of(kind))
    whole = kind.decode(ids)
    spans = st.tuples(st.integers(0, len(whole)), st.integers(1, 6))
    parts = data.draw(st.lists(spans.map(lambda span: whole[span[0] : sum(span)]), max_size=4))
    stops = [part for part in parts if part] + data.draw(st.lists(st.text("ab \ufffd", max_size=3)))

    stream = TextStream(kind, stop=stop_strings(stops))
    text = stream_in_pieces(stream, ids, sizes)

    expected = first_stop(whole, [stop for stop in stops if stop])
    assert stream.stopped == (expected is not None)
    if expected is None:
        assert (text, stream.matched) == (whole, None)
    else:
        start, stop = expected
        assert (text, stream.matched) == (whole[:start], stop)


@given(
    letters=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    sizes=st.lists(st.integers(0, 4), max_size=20),
)
@example(letters="aab", stops=["aab"], sizes=[1, 1, 1])
@example(letters="abcd".replace("c", "a"), stops=["abab", "ba"], sizes=[1] * 4)
def test_dense_overlaps(letters: str, stops: list[str], sizes: list[int]) -> None:
    """Two letters make every kind of overlap between stop strings and text."""
    stream = TextStream(tokenizer(), stop=stop_strings(stops))
    ids = [tokenizer().encode(letter, add_special_tokens=False)[0] for letter in letters]
    expected = first_stop(letters, stops)
    assert stream_in_pieces(stream, ids, sizes) == letters[: expected[0] if expected else None]
    assert stream.matched == (expected[1] if expected else None)


@given(data=st.data(), stops=st.lists(st.text("hel w", min_size=1, max_size=5), max_size=3))
def test_holds_back_only_what_could_become_a_stop_string(
    data: st.DataObject, stops: list[str]
) -> None:
    kind = tokenizer()
    ids = kind.encode(data.draw(st.text("hel wö", max_size=20)), add_special_tokens=False)
    stream, plain = TextStream(kind, stop=stop_strings(stops)), TextStream(kind)
    sent = certain = ""
    for token in ids:
        sent += stream.push([token])
        certain += plain.push([token])
        if first_stop(certain, stops):
            return
        starts = [
            at for at in range(len(certain)) if any(s.startswith(certain[at:]) for s in stops)
        ]
        assert sent == certain[: min(starts, default=len(certain))]


def test_a_character_is_never_split() -> None:
    stream = TextStream(tokenizer())
    ids = tokenizer().encode("é🙂", add_special_tokens=False)
    assert [stream.push([token]) for token in ids] == ["é", "", "", "🙂"]
    assert stream.offsets == [0, 1, 1, 1]


def test_a_cut_character_ends_as_one_replacement() -> None:
    stream = TextStream(tokenizer())
    ids = tokenizer().encode("ok🙂", add_special_tokens=False)[:-1]
    assert (stream.push(ids), stream.finish()) == ("ok", "\ufffd")
    by_length = TextStream(tokenizer())
    assert (by_length.push(ids), by_length.finish(cut=True)) == ("ok", "")


@families
@given(data=st.data())
def test_an_answer_that_is_cut_short_ends_with_its_last_whole_character(
    name: str, data: st.DataObject
) -> None:
    kind = family(name)
    text = data.draw(st.text("aé🙂 終", min_size=1, max_size=12))
    ids = kind.encode(text, add_special_tokens=False)
    if "\ufffd" in kind.decode(ids):  # this family cannot write all of them
        return
    whole = kind.decode(ids)
    for size in range(len(ids) + 1):
        stream = TextStream(kind)
        sent = stream.push(ids[:size]) + stream.finish(cut=True)
        assert "\ufffd" not in sent
        assert whole.startswith(sent.rstrip(" ")), (ids[:size], sent)


def test_byte_fallback_shows_a_character_when_its_run_of_bytes_ends() -> None:
    kind = family("byte_fallback")
    stream = TextStream(kind)
    ids = kind.encode("ñ h", add_special_tokens=False)
    assert [kind.token(token) for token in ids] == ["▁", "<0xC3>", "<0xB1>", "▁", "h"]
    assert [stream.push([token]) for token in ids] == ["", "", "", "ñ ", "h"]


def test_stop_string_over_several_tokens_and_scripts() -> None:
    stream = TextStream(tokenizer(), stop=stop_strings(["終わり🙂"]))
    ids = tokenizer().encode("これで終わる。終わり🙂 more", add_special_tokens=False)
    assert "".join(stream.push([token]) for token in ids) == "これで終わる。"
    assert (stream.matched, stream.finish()) == ("終わり🙂", "")


def test_an_earlier_candidate_is_waited_for() -> None:
    ids = {letter: tokenizer().encode(letter, add_special_tokens=False) for letter in "abcdx"}
    longer = TextStream(tokenizer(), stop=stop_strings(["abcd", "bc"]))
    assert [longer.push(ids[letter]) for letter in "abc"] == ["", "", ""]
    assert not longer.stopped
    assert (longer.push(ids["d"]), longer.matched) == ("", "abcd")

    shorter = TextStream(tokenizer(), stop=stop_strings(["abcd", "bc"]))
    assert "".join(shorter.push(ids[letter]) for letter in "abcx") == "a"
    assert shorter.matched == "bc"

    ended = TextStream(tokenizer(), stop=stop_strings(["abcd", "bc"]))
    ended.push(ids["a"] + ids["b"] + ids["c"])
    assert (ended.finish(), ended.matched) == ("a", "bc")


def test_tokens_after_the_stop_are_not_taken_in() -> None:
    stream = TextStream(tokenizer(), stop=stop_strings(["b"]))
    ids = tokenizer().encode("abcd", add_special_tokens=False)
    assert stream.push(ids) == "a"
    assert stream.offsets == [0, 1]
    assert (stream.push(ids), stream.finish(), stream.offsets) == ("", "", [0, 1])


def test_special_tokens_can_be_shown_and_stopped_at() -> None:
    ids = tokenizer().encode(f"a{SPECIALS[1]}b", add_special_tokens=False)
    assert TextStream(tokenizer()).push(ids) == "ab"
    shown = TextStream(tokenizer(), stop=stop_strings([SPECIALS[1]]), skip_special_tokens=False)
    assert (shown.push(ids), shown.matched) == ("a", SPECIALS[1])


@families
@given(data=st.data())
def test_offsets_lie_in_the_text_in_order(name: str, data: st.DataObject) -> None:
    kind = family(name)
    ids = data.draw(ids_of(kind))
    stream = TextStream(kind)
    text = stream.push(ids) + stream.finish()
    assert len(stream.offsets) == len(ids)
    assert all(before <= after for before, after in pairwise(stream.offsets))
    assert all(0 <= offset <= len(text) for offset in stream.offsets)


@given(text=st.text("hello wörld🙂"))
def test_offsets_point_at_the_tokens_own_text(text: str) -> None:
    kind = tokenizer()
    stream = TextStream(kind)
    ids = kind.encode(text, add_special_tokens=False)
    stream.push(ids)
    for token, offset in zip(ids, stream.offsets, strict=True):
        own = kind.token_text(token)
        if "\ufffd" not in own:
            assert text[offset:].startswith(own)


def test_a_long_near_miss_costs_one_step_a_character() -> None:
    """The search goes back through its table at most as often as it went forward."""
    stop = "a" * 20_000 + "b"
    finder = StopFinder(stop_strings([stop]))
    assert finder.push("a" * 100_000) is None
    assert finder.open_chars == 20_000
    assert finder.push("b") is not None
