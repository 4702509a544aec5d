"""What a JSON body takes in the server while a prompt is made of it: counted, not decoded."""

from __future__ import annotations

from penstock.errors import BadRequest

# Bytes of the process per byte of body, booked before it is read: for the body, its texts and the
# prompt made of them, or for token ids (4.8: each is an object and a place in a list).
BODY_FACTOR = 5
# A single character that is not Latin makes every other of its text take four bytes, in the
# message and in the prompt.
_WIDE_FACTOR = 12
# And for each value, string (twice), list, object and key of it, however short; an object may be a
# message or a call, which is made once more for the chat template, and keys are written out by it.
# Measured for every shape in `testing/bodies.py` (`test_decoded_bytes.py`).
_MARKS = {b",": 32, b'"': 20, b"[": 80, b"{": 320, b":": 260}
# A decoder makes so many in less than a tenth of a second, in which no other thread runs.
MAX_OBJECTS = 1 << 16
MAX_STRINGS = 1 << 20
_COUNTED_BYTES = 1 << 20  # what is shorter cannot hold so many that it matters
_WEIGHED_BYTES = 64 << 10  # in one go, in which no other thread runs
_NO_MARKS = bytes(set(range(256)) - set(b'{}[]",:\\'))


class JsonWeight:
    """What a JSON body takes at most while it is made into a prompt, itself included.

    It is counted piece by piece, as the body comes, without a look at what is text and what is
    not: marks within a text are booked for nothing. Objects and strings are counted in what is left
    without letters and white space. There an object begins with `{"`, which no text contains: a
    quote in a text has a backslash before it. So only a text that ends in a brace is taken for an
    object, and a quote behind an escaped backslash is missed.
    """

    def __init__(self) -> None:
        self._length = 0
        self._marks_bytes = 0
        self._wide = False
        self._objects = 0
        self._quotes = 0
        self._last = b""  # byte of the body
        self._last_mark = b""

    @property
    def decoded_bytes(self) -> int:
        """Of all that was added."""
        return self._length * (_WIDE_FACTOR if self._wide else BODY_FACTOR) + self._marks_bytes

    def add(self, piece: bytes) -> None:
        """The next piece; `BadRequest` if there is more by now than any request needs, or than a
        decoder makes in a moment."""
        self._length += len(piece)
        marks = piece.translate(None, _NO_MARKS)
        self._marks_bytes += sum(each * marks.count(mark) for mark, each in _MARKS.items())
        if not self._wide:
            self._wide = not piece.isascii() or b"\\u" in piece or self._last + piece[:1] == b"\\u"
        marks = self._last_mark + marks
        self._objects += marks.count(b'{"')
        self._quotes += marks.count(b'"', len(self._last_mark)) - marks.count(b'\\"')
        self._last, self._last_mark = piece[-1:] or self._last, marks[-1:]
        if self._length > _COUNTED_BYTES:
            _check_count(self._objects, MAX_OBJECTS, "objects")
            _check_count(self._quotes // 2, MAX_STRINGS, "strings")


def _check_count(count: int, most: int, what: str) -> None:
    if count > most:
        raise BadRequest(
            f"The request body has more than {most} {what}, which is all that is allowed. Send "
            "fewer messages, items or parts, each with more text."
        )


def decoded_bytes(body: bytes) -> int:
    """What a whole JSON body takes at most while it is made into a prompt, itself included."""
    weight = JsonWeight()
    for start in range(0, len(body), _WEIGHED_BYTES):
        weight.add(body[start : start + _WEIGHED_BYTES])
    return weight.decoded_bytes
