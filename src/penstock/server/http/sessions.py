"""Browsers that have signed in: a random token in a cookie stands for a key.

Only digests are kept, of the tokens and of the keys. Sessions are bounded in number and in time and
end with the server. Which keys are good for what is `access`' to say: a session of a key that the
settings no longer have opens nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from penstock.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

MAX_SESSIONS = 64
MAX_SIGNING_IN = 8
IDLE_S = 12 * 3600.0
LONGEST_S = 7 * 24 * 3600.0


@dataclass(slots=True)
class _Session:
    """One browser."""

    key_digest: bytes
    opened_at: float
    used_at: float


class Sessions:
    """The sessions of one server, the least recently used first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[bytes, _Session] = {}
        self._signing_in: dict[asyncio.Timeout, None] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    @asynccontextmanager
    async def signing_in(self) -> AsyncIterator[None]:
        """A place for one who is about to show a key. There are few; where they are all taken,
        `Overloaded` ends whoever has taken longest."""
        try:
            async with asyncio.timeout(None) as patience:
                if len(self._signing_in) >= MAX_SIGNING_IN:
                    longest = next(iter(self._signing_in))
                    del self._signing_in[longest]
                    longest.reschedule(asyncio.get_running_loop().time())
                self._signing_in[patience] = None
                try:
                    yield
                finally:
                    self._signing_in.pop(patience, None)
        except TimeoutError:
            raise Overloaded(
                f"More than {MAX_SIGNING_IN} sign in at once; send the whole request at once.",
                retry_after_s=1,
            ) from None

    def open(self, key_digest: bytes) -> str:
        """A token for a browser that has shown a key. Where there are too many, one of the key with
        the most gives way, its least recently used: no key signs others out."""
        self._drop_expired()
        while len(self._sessions) >= MAX_SESSIONS:
            counts = Counter(session.key_digest for session in self._sessions.values())
            counts[key_digest] += 1
            most = max(counts.values())
            oldest = next(m for m, s in self._sessions.items() if counts[s.key_digest] == most)
            del self._sessions[oldest]
        token, now = secrets.token_urlsafe(32), self._clock()
        self._sessions[_digest(token)] = _Session(key_digest, now, now)
        return token

    def key_digest(self, token: str) -> bytes | None:
        """The digest of the key that was shown for this token; using it keeps the session alive."""
        mark = _digest(token)
        session = self._sessions.pop(mark, None)
        if session is None or self._expired(session):
            return None
        session.used_at = self._clock()
        self._sessions[mark] = session
        return session.key_digest

    def close(self, token: str) -> None:
        """Sign out."""
        self._sessions.pop(_digest(token), None)

    def _expired(self, session: _Session) -> bool:
        now = self._clock()
        return now - session.used_at > IDLE_S or now - session.opened_at > LONGEST_S

    def _drop_expired(self) -> None:
        for mark in [mark for mark, session in self._sessions.items() if self._expired(session)]:
            del self._sessions[mark]


def _digest(token: str) -> bytes:
    # Tokens are found by their digest, so the time of a look-up says nothing about them.
    return sha256(token.encode()).digest()
