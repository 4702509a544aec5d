"""Sends bodies of `testing.bodies` from a process of its own, and says how each went.

    python -m penstock.testing.body_client URL BYTES  < names, as a JSON list of [route, name]

A line for each: route, name, status, when it was sent and how long it took, on the wall clock.
"""

from __future__ import annotations

import json
import sys
import time

import httpx

from penstock.testing.bodies import shapes


def main() -> None:
    """Send them one after the other."""
    url, size = sys.argv[1], int(sys.argv[2])
    made = shapes()
    with httpx.Client(base_url=url, timeout=120) as client:
        for route, name in json.load(sys.stdin):
            body = made[route, name](size)
            began = time.time()
            try:
                answer = client.post(route, content=body)
                status, text = answer.status_code, answer.text[:300]
            except httpx.TransportError as error:
                status, text = 0, repr(error)
            taken = time.time() - began
            row = {"route": route, "name": name, "status": status, "text": text}
            print(json.dumps({**row, "began": began, "taken_s": taken}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
