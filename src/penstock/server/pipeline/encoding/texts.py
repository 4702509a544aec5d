"""From what a client sends to texts in tokens, each as long as the model reads at once.

What they take is booked before it is made. A text that is too long is refused with the numbers, or
cut where the protocol asks for that; special tokens stay.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import BadRequest
from penstock.memory.admission import RequestNeed
from penstock.memory.clients.requests import TOKEN_BYTES
from penstock.server.fields.generation import check_token_ids
from penstock.server.http.threads import run_in_thread_if_large
from penstock.text.surroundings import pair_surroundings, surroundings
from penstock.text.tokenizer import LONG_TEXT_CHARS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from penstock import wire
    from penstock.server.pipeline.front_door import FrontDoor
    from penstock.text.tokenizer import Tokenizer

# A text that waits: its tokens packed, and what Python needs around them.
_PACKED_BYTES, _TEXT_BYTES = 4, 200
MAX_TEXTS = 2048  # of a request, as OpenAI has it


@dataclass(frozen=True, slots=True)
class EncodeText:
    """One text, or pair of texts, that goes to the model."""

    ids: array[int]
    encoding: wire.Encoding


@dataclass(frozen=True, slots=True)
class Reading:
    """How texts of a request become tokens."""

    door: FrontDoor
    tokenizer: Tokenizer
    window: int
    cut: int | None = None  # longer ones are cut to so many tokens; None: they are refused

    @property
    def _most(self) -> int | None:
        return None if self.cut is None else min(self.cut, self.window)

    async def texts(self, texts: list[str], encoding: wire.Encoding) -> list[EncodeText]:
        """Texts by themselves."""
        around = surroundings(self.tokenizer)
        self._check_room(around.added)
        most = self._most
        return [
            await self._text(around.around(ids, most), encoding)
            async for ids in self._encoded(texts)
        ]

    async def ids(self, lists: list[list[int]], encoding: wire.Encoding) -> list[EncodeText]:
        """Token ids as they are: nothing is added to them."""
        self._check_room(0)
        found: list[EncodeText] = []
        for ids in lists:
            packed = await run_in_thread_if_large(len(ids), partial(self._packed, ids))
            found.append(await self._text(packed[: self._most], encoding))
        return found

    async def pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        encoding: wire.Encoding,
        most_second: int | None = None,
    ) -> list[EncodeText]:
        """Each pair as the tokenizer joins them. A second text of more than `most_second` tokens is
        cut to them; where what is too long is cut at all, it is the second that gives way."""
        form = pair_surroundings(self.tokenizer)
        distinct = list(dict.fromkeys(first for first, _ in pairs))
        encoded = [ids async for ids in self._encoded(distinct)]
        firsts = dict(zip(distinct, encoded, strict=True))
        found: list[EncodeText] = []
        async for second in self._encoded([second for _, second in pairs]):
            first = firsts[pairs[len(found)][0]]
            kept = second[:most_second]
            if self._most is not None:
                taken = form.added + len(first)
                self._check_room(taken)
                kept = kept[: self._most - taken]
            ids, begins = form.joined(first, kept)
            said = msgspec.structs.replace(encoding, second=begins)
            found.append(await self._text(ids, said))
        return found

    async def prompt_tokens(self, prompt: str) -> int:
        """How many tokens a prompt comes to at the beginning of a text."""
        around = surroundings(self.tokenizer)
        return len(around.before) + sum([len(ids) async for ids in self._encoded([prompt])])

    def _check_room(self, taken: int) -> None:
        """Where texts are cut, something of them must be left."""
        if self._most is not None and self._most <= taken:
            field = self.door.prompt_field
            raise BadRequest(
                f"`{field}` would be cut to {self._most} tokens, and {taken} of them are taken by "
                "what must stay; allow more tokens.",
                param=field,
            )

    async def _encoded(self, texts: list[str]) -> AsyncIterator[array[int]]:
        """The ids of each text, without special tokens; at most some short texts' at a time."""
        if self.cut is None and texts:
            least = self.tokenizer.min_tokens_of(max(texts, key=len))
            await self.door.check(self._need(least, at_least=True))
        for group in _groups(texts):
            if len(group) > 1:
                for ids in await self.door.tokens_of_all(self.tokenizer, group):
                    yield ids
                continue
            alone = await self.door.tokens(self.tokenizer, group[0], add_special_tokens=False)
            yield await run_in_thread_if_large(len(alone), partial(array, "i", alone))
            self.door.memory.shrink(TOKEN_BYTES * len(alone))

    def _packed(self, ids: list[int]) -> array[int]:
        check_token_ids(ids, self.door.card.vocab_size, self.door.prompt_field)
        return array("i", ids)

    async def _text(self, ids: array[int], encoding: wire.Encoding) -> EncodeText:
        """A text that fits, booked."""
        if not ids:
            field = self.door.prompt_field
            raise BadRequest(f"`{field}` comes to no token at all.", param=field)
        if len(ids) > self.window:
            await self.door.check(self._need(len(ids)))
        await self.door.memory.grow(_TEXT_BYTES + _PACKED_BYTES * len(ids))
        return EncodeText(ids, encoding)

    def _need(self, tokens: int, *, at_least: bool = False) -> RequestNeed:
        return RequestNeed(tokens, 0, self.door.prompt_field, at_least=at_least, answer_tokens=0)


def _groups(texts: list[str]) -> Iterator[list[str]]:
    """Neighbours that together are no longer than one short text."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > LONG_TEXT_CHARS:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group
