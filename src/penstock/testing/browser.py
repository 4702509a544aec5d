"""A browser for tests and screenshots: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
API_KEY, ADMIN_KEY = "key-of-a-user", "key-of-an-admin"
# Names that lead here, as those of an attacker do who owns their zones.
NAMES = ("evil.example", "rebound.example")


@contextmanager
def launched() -> Iterator[Browser]:
    """The browser, without a window."""
    from playwright.sync_api import sync_playwright

    rules = ", ".join(f"MAP {name} 127.0.0.1" for name in NAMES)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                f"--host-resolver-rules={rules}",
                # Other browsers have no such checks; what they let through must not work either.
                "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests",
                "--disable-gpu",
            ],
            chromium_sandbox=os.geteuid() != 0,  # it does not run as root
        )
        yield browser
        browser.close()


@dataclass
class Tab:
    """A page of the server, and what went wrong in it."""

    page: Page
    url: str
    expected: tuple[str, ...] = ()  # parts of console messages that a test provokes
    problems: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Note errors, and requests to anywhere else."""

        def heard(message: ConsoleMessage) -> None:
            expected = any(part in message.text for part in self.expected)
            if message.type in ("error", "warning") and not expected:
                self.problems.append(message.text)

        def asked(request: Request) -> None:
            if not request.url.startswith((f"{self.url}/", "data:", "blob:")):
                self.problems.append(f"a request to {request.url}")

        self.page.on("console", heard)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", asked)

    def show(self, name: str) -> Page:
        """One of the pages, drawn."""
        self.page.goto(f"{self.url}/#/{name}")
        self.page.locator(f".page.{name}").wait_for()
        return self.page


@contextmanager
def load_on(url: str, model: str, clients: int = 3) -> Iterator[None]:
    """Streams of requests, one after another, until the block ends."""
    over = threading.Event()

    def stream() -> None:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Count from one to a hundred in words."}],
            "max_tokens": 200,
            "stream": True,
        }
        with httpx.Client(timeout=120) as client:
            while not over.is_set():
                with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                    for _ in answer.iter_lines():
                        if over.is_set():
                            break

    threads = [threading.Thread(target=stream) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
