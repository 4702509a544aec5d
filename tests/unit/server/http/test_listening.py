"""The socket that is listened on."""

from __future__ import annotations

import socket

from penstock.server.http.listening import listen


def test_connections_send_small_answers_at_once() -> None:
    with (
        listen("127.0.0.1", 0) as listening,
        socket.create_connection(listening.getsockname()),
    ):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
