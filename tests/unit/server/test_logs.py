"""What a client can make the server log."""

from __future__ import annotations

import logging

from penstock.server.logs import RateLimit


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _record(line: int, message: str = "bad request") -> logging.LogRecord:
    return logging.LogRecord("http", logging.WARNING, "protocol.py", line, message, None, None)


def test_a_statement_is_logged_a_few_times_a_period_and_tells_what_was_left_out() -> None:
    clock = _Clock()
    limit = RateLimit(3, 60.0, clock)
    assert [limit.filter(_record(1)) for _ in range(10)] == [True] * 3 + [False] * 7
    clock.now += 59.0
    assert not limit.filter(_record(1))
    clock.now += 1.0
    first, second = _record(1), _record(1)
    assert limit.filter(first) and limit.filter(second)
    assert (first.__dict__["fields"], "fields" in second.__dict__) == ({"left_out": 8}, False)


def test_statements_are_counted_apart_whatever_their_messages_say() -> None:
    limit = RateLimit(1, 60.0, _Clock())
    assert [limit.filter(_record(1, f"from {n}")) for n in range(3)] == [True, False, False]
    assert limit.filter(_record(2))
