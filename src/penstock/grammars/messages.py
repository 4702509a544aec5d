"""What the server, a model's grammar host, its matchers and the worker say to each other.

    server  ◀─ stream of frames ─▶  host         Begin, Compile / Up, Alive, Compiled, Wanted
    worker  ◀─ packets, one each ─▶ host         Open / Opened (with a socket), Refused, Evicted
    worker  ◀─ stream of frames ─▶  matcher      Ask, Drop / Mask

The packet socket outlives hosts: a new one finds what was asked for while there was none.
"""

from __future__ import annotations

from enum import Enum

import msgspec

PACKET_BYTES = 4096
ALIVE_S = 5.0  # between two words of a host


class Bounds(msgspec.Struct, frozen=True):
    """What the matchers of one model may take. A grammar is compiled in the quick lane first; one
    that needs more than that is compiled again, behind others and within its full limits."""

    total_bytes: int  # all matchers together
    one_bytes: int  # a single matcher
    quick_bytes: int  # a single matcher while it compiles in the quick lane
    timeout_s: float  # processor time to compile one grammar, and for one mask
    quick_s: float = 0.25  # likewise, in the quick lane
    wall_factor: float = 15.0  # a compile is ended after so many times its processor time
    idle_s: float = 20.0  # a matcher that nobody uses is kept for so long

    @property
    def large_total_bytes(self) -> int:
        """What those compiled in the slow lane may take together: the rest is for small ones."""
        return self.total_bytes * 3 // 4


class Begin(msgspec.Struct, tag=True):
    """The first message: the vocabulary, and what grammars may cost."""

    tokens: list[bytes]  # the bytes of each id
    special_ids: list[int]  # these only stand where a grammar names them
    limits: dict[str, int]  # llguidance's own
    bounds: Bounds


class Compile(msgspec.Struct, tag=True):
    """Have a matcher for this grammar; answered with `Compiled`."""

    key: bytes
    text: str
    quick: bool


class Outcome(Enum):
    """What became of a compile."""

    READY = "ready"
    INVALID = "invalid"  # the library says why
    EXCEEDED = "exceeded"  # it ran into the limits of its lane


class Compiled(msgspec.Struct, tag=True):
    """The answer to `Compile`."""

    key: bytes
    outcome: Outcome
    reason: str = ""


class Up(msgspec.Struct, tag=True):
    """The vocabulary is read."""

    private_bytes: int


class Alive(msgspec.Struct, tag=True):
    """Said every `ALIVE_S`: a host that is hung or stopped says nothing."""


class Wanted(msgspec.Struct, tag=True):
    """The worker wants a matcher of a grammar that has none: compile it again."""

    key: bytes


ToHost = Begin | Compile
FromHost = Up | Alive | Compiled | Wanted


class Open(msgspec.Struct, tag=True):
    """The worker wants to follow this grammar."""

    key: bytes


class Opened(msgspec.Struct, tag=True):
    """A socket to its matcher comes with this."""

    key: bytes


class Refused(msgspec.Struct, tag=True):
    """There will be no matcher."""

    key: bytes
    reason: str


class Evicted(msgspec.Struct, tag=True):
    """Its matcher is ended to make room, not for a fault: open it again."""

    key: bytes


FromHostToWorker = Opened | Refused | Evicted


class Ask(msgspec.Struct, tag=True, array_like=True):
    """The mask behind `at` tokens of an answer, of which these are the latest."""

    id: int  # of the request
    at: int
    tokens: list[int]


class Drop(msgspec.Struct, tag=True, array_like=True):
    """A request has ended."""

    id: int


class Mask(msgspec.Struct, array_like=True):
    """The answer to `Ask`."""

    id: int
    at: int
    accepting: bool  # the answer may end here
    error: str  # why the grammar cannot be followed further
    cpu_s: float  # that it took
    bits: bytes  # one for each token


ToMatcher = Ask | Drop

to_host = msgspec.msgpack.Decoder(ToHost)
from_host = msgspec.msgpack.Decoder(FromHost)
open_order = msgspec.msgpack.Decoder(Open)
from_host_to_worker = msgspec.msgpack.Decoder(FromHostToWorker)
to_matcher = msgspec.msgpack.Decoder(ToMatcher)
mask_answer = msgspec.msgpack.Decoder(Mask)
packed = msgspec.msgpack.Encoder().encode
