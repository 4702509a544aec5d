"""What the kernel says of a connection."""

from __future__ import annotations

import select
import socket

from penstock.server.http.peer import has_unread


def test_bytes_that_nobody_has_read() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert not has_unread(near)
        far.sendall(b"GET /")
        select.select([near], [], [], 5)
        assert has_unread(near)
        near.recv(10)
        assert not has_unread(near)
    assert not has_unread(near)
