"""Sessions of browsers: bounded in number and in time."""

from __future__ import annotations

from penstock.server.http.sessions import IDLE_S, LONGEST_S, MAX_SESSIONS, Sessions

KEY = b"digest of a key"


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_token_stands_for_its_key_until_it_is_closed() -> None:
    sessions = Sessions()
    token, other = sessions.open(KEY), sessions.open(b"another")
    assert (sessions.key_digest(token), sessions.key_digest(other)) == (KEY, b"another")
    assert sessions.key_digest(token[:-1]) is None
    assert sessions.key_digest("") is None
    sessions.close(token)
    sessions.close("unknown")
    assert sessions.key_digest(token) is None
    assert sessions.key_digest(other) == b"another"


def test_a_session_ends_when_it_is_not_used() -> None:
    clock = _Clock()
    sessions = Sessions(clock)
    token = sessions.open(KEY)
    clock.now = IDLE_S - 1
    assert sessions.key_digest(token) == KEY
    clock.now += IDLE_S - 1  # since its use, not since it was opened
    assert sessions.key_digest(token) == KEY
    clock.now += IDLE_S + 1
    assert sessions.key_digest(token) is None


def test_a_session_ends_however_much_it_is_used() -> None:
    clock = _Clock()
    sessions = Sessions(clock)
    token = sessions.open(KEY)
    while clock.now + IDLE_S / 2 <= LONGEST_S:
        clock.now += IDLE_S / 2
        assert sessions.key_digest(token) == KEY
    clock.now += IDLE_S / 2
    assert sessions.key_digest(token) is None
    assert len(sessions) == 0


def test_the_least_recently_used_gives_way() -> None:
    sessions = Sessions()
    tokens = [sessions.open(KEY) for _ in range(MAX_SESSIONS)]
    assert sessions.key_digest(tokens[0]) == KEY  # used: the second is now the oldest
    sessions.open(KEY)
    assert len(sessions) == MAX_SESSIONS
    assert sessions.key_digest(tokens[1]) is None
    assert sessions.key_digest(tokens[0]) == KEY


def test_expired_sessions_make_room_first() -> None:
    clock = _Clock()
    sessions = Sessions(clock)
    for _ in range(MAX_SESSIONS):
        sessions.open(KEY)
    clock.now = IDLE_S + 1
    sessions.open(KEY)
    assert len(sessions) == 1


def test_no_key_signs_others_out() -> None:
    sessions = Sessions()
    admin = sessions.open(b"of an admin")
    tokens = [sessions.open(KEY) for _ in range(3 * MAX_SESSIONS)]
    assert len(sessions) == MAX_SESSIONS
    assert sessions.key_digest(admin) == b"of an admin"
    assert [sessions.key_digest(token) for token in tokens[-MAX_SESSIONS + 1 :]].count(None) == 0
    sessions.open(b"a third")
    assert sessions.key_digest(admin) == b"of an admin"


def test_a_key_with_as_many_sessions_as_any_other_loses_one_of_its_own() -> None:
    sessions = Sessions()
    first = [sessions.open(b"first") for _ in range(MAX_SESSIONS // 2)]
    second = [sessions.open(b"second") for _ in range(MAX_SESSIONS // 2)]
    sessions.open(b"second")
    assert None not in map(sessions.key_digest, first)
    assert sessions.key_digest(second[0]) is None
