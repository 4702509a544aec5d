"""The frames of all our sockets: four bytes of length (big endian) and one message."""

from __future__ import annotations

import struct

MAX_FRAME_BYTES = 256 << 20  # a guard against a broken peer, far above any real message
HEADER = struct.Struct(">I")


def too_large(size: int) -> ValueError:
    """Nobody means a frame of so many bytes."""
    return ValueError(f"a frame of {size} bytes is over the {MAX_FRAME_BYTES} allowed")


class FrameReader:
    """Cuts a byte stream into message bodies; feed it what arrives, take what is whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies completed by `data`, in order."""
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(buffer) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(buffer, start)
            if size > MAX_FRAME_BYTES:
                raise too_large(size)
            end = start + HEADER.size + size
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                bodies.append(bytes(view[start + HEADER.size : end]))
            start = end
        if start:
            del buffer[:start]
        return bodies
