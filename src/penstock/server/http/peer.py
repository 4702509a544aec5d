"""Whether the other end of a connection is still there, when nothing is read from it.

Reading would tell, but a connection is not read while its request waits for memory or a turn. And
a FIN alone does not say whether a client has left or has only closed its sending half and waits
for the answer. The kernel knows more: the state of our own socket, and for a peer on this machine
the state of its socket too.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import ipaddress
import re
import socket
import struct
import sys
import termios
from typing import Any

_LINUX = sys.platform.startswith("linux")
# States of TCP, as in the kernel's net/tcp_states.h.
_ESTABLISHED, _CLOSED, _CLOSE_WAIT = 1, 7, 8
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, _NLMSG_ERROR = 4, 20, 1, 2
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_REQUEST = struct.Struct("=BBBBI")  # inet_diag_req_v2 before the id
_INODE_AT = _HEADER.size + 4 + 48 + 16  # in inet_diag_msg: behind state, id, and four numbers


LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Peer(enum.Enum):
    """What is known of the other end."""

    OPEN = "open"
    HALF_CLOSED = "half-closed"  # it has sent FIN, and its process still has the socket
    FINISHED = "finished"  # it has sent FIN; whether it still reads cannot be seen from here
    GONE = "gone"


def look(sock: Any) -> Peer:
    """What the kernel says of the peer of a TCP socket; `OPEN` where it says nothing."""
    if not _LINUX:
        return Peer.OPEN
    try:
        state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if state == _CLOSED:
            return Peer.GONE
        if state not in (_ESTABLISHED, _CLOSE_WAIT):
            return Peer.OPEN
        # A FIN behind bytes that are not read does not arrive: the connection seems established.
        seen = Peer.FINISHED if state == _CLOSE_WAIT else Peer.OPEN
        peer = sock.getpeername()
        if not is_loopback_address(peer[0]):
            return seen
        return _look_at_other_end(peer, sock.getsockname(), seen)
    except OSError:
        return Peer.GONE


def has_unread(sock: Any) -> bool:
    """Whether bytes have arrived that nobody has read yet."""
    try:
        return bool(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.FIONREAD, b"\0" * 4))[0])
    except (OSError, ValueError):  # it is closed
        return False


def _look_at_other_end(peer: Any, own: Any, seen: Peer) -> Peer:
    """The same, for a peer on this machine; `seen` is what its packets say."""
    try:
        inode = _inode(peer, own)
    except OSError:
        return seen
    # A socket that no process has any more has no inode.
    if not inode:
        return Peer.GONE
    return Peer.HALF_CLOSED if seen is Peer.FINISHED else seen


def _inode(source: Any, destination: Any) -> int:
    """Of the socket bound to `source` and connected to `destination`; 0 if nobody has it."""
    family = socket.AF_INET6 if ":" in source[0] else socket.AF_INET
    addresses = [socket.inet_pton(family, a[0]).ljust(16, b"\0") for a in (source, destination)]
    body = (
        _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
        + struct.pack("!HH", source[1], destination[1])
        + b"".join(addresses)
        + struct.pack("=I", 0)
        + b"\xff" * 8  # any cookie
    )
    size = _HEADER.size + len(body)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as netlink:
        netlink.settimeout(0.1)
        netlink.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body)
        answer = netlink.recv(4096)
    if _HEADER.unpack_from(answer)[1] == _NLMSG_ERROR:
        error = -struct.unpack_from("=i", answer, _HEADER.size)[0]
        if error == 2:  # ENOENT: there is no such socket
            return 0
        raise OSError(error, "sock_diag")
    inode: int = struct.unpack_from("=I", answer, _INODE_AT)[0]
    return inode


def is_loopback_address(address: str) -> bool:
    """Whether an address is this machine's own."""
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        mapped = getattr(parsed, "ipv4_mapped", None)
        return bool((mapped or parsed).is_loopback)
    return False


def group_of(address: str) -> str:
    """Whom an address is counted as: this machine is one, and so is an IPv6 network of /64."""
    if is_loopback_address(address):
        return "loopback"
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(parsed, ipaddress.IPv6Address):
            return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))
    return address


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host in LOOPBACK_NAMES or bool(re.fullmatch(r"127(\.\d{1,3}){3}", host))
