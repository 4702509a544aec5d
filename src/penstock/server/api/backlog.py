"""What waits for a client that reads more slowly than the model writes: booked, and compact.

Pieces are handed on one by one as long as the client keeps up. Behind that they are merged, so
that an answer that nobody reads comes to a hundred bytes a token, not to an object a token.
Every byte of it is in the request's share. Knows pieces, not how they are rendered or sent.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.memory.requests import LOGPROB_BYTES
from penstock.text.parts import merged

if TYPE_CHECKING:
    from penstock.memory.requests import Share
    from penstock.server.api.generation import Piece

# A piece of one token, measured: the object with its lists, then its text, ids and offsets alone.
PIECE_BYTES = 700
MERGED_TOKEN_BYTES = 128

_KEPT_APART = 64  # pieces; a client that lags behind by more is not kept up with token by token
_MERGED_TOKENS = 256  # in one piece: merging copies its text


class Backlog:
    """A sink for pieces, read by whoever sends them."""

    keeps = False

    def __init__(self, share: Share) -> None:
        self._share = share
        self._pieces: list[Piece] = []
        self._latest: dict[int, Piece] = {}  # by choice, those that can still be added to
        self._held = 0  # bytes booked for what is waiting
        self._sending = 0  # and for what was taken and is on its way
        self._used = False
        self._ended = False
        self._arrived = asyncio.Event()

    def put(self, piece: Piece) -> None:
        """Take the next piece of a choice."""
        self._used = True
        size = LOGPROB_BYTES * sum(1 + len(one.top) for one in piece.logprobs)
        latest = self._latest.get(piece.choice)
        if latest is not None and len(self._pieces) >= _KEPT_APART and _may_join(latest, piece):
            _join(latest, piece)
            size += MERGED_TOKEN_BYTES * len(piece.tokens)
        else:
            self._pieces.append(piece)
            self._latest[piece.choice] = piece
            size += PIECE_BYTES + MERGED_TOKEN_BYTES * len(piece.tokens)
        self._held += size
        self._share.grow_now(size)
        self._arrived.set()

    def restart(self) -> bool:
        """Only while nothing was put: the client may have seen it."""
        return not self._used

    def end(self) -> None:
        """Nothing more will come."""
        self._ended = True
        self._arrived.set()

    @property
    def ended(self) -> bool:
        """Whether everything there will ever be was taken."""
        return self._ended and not self._pieces

    async def take(self, patience_s: float) -> list[Piece]:
        """What is there, as soon as there is something; nothing after that long, or at the end."""
        if not self._pieces and not self._ended:
            self._arrived.clear()
            try:
                async with asyncio.timeout(patience_s):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        pieces, self._pieces = self._pieces, []
        self._latest.clear()
        self._sending, self._held = self._sending + self._held, 0
        return pieces

    def sent(self) -> None:
        """What was taken is with the client."""
        self._share.shrink(self._sending)
        self._sending = 0


def _may_join(latest: Piece, piece: Piece) -> bool:
    return (
        latest.finish is None
        and piece.prompt_logprobs is None
        and len(latest.tokens) < _MERGED_TOKENS
    )


def _join(latest: Piece, piece: Piece) -> None:
    latest.text += piece.text
    latest.tokens += piece.tokens
    latest.offsets += piece.offsets
    latest.logprobs += piece.logprobs
    latest.parts = merged([*latest.parts, *piece.parts])
    latest.finish, latest.stop_string = piece.finish, piece.stop_string
