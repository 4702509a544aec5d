"""`penstock chat`: a conversation in the terminal, through a running server."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock.cli.remote import RemoteError, connect, require_success
from penstock.cli.terminal import print_json, print_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    import httpx

# Which state a model should be in that nobody has named; any other is the third best.
_PREFERENCE = {"ready": 0, "loading": 1, "failed": 3}
_HELP = "Ctrl-C stops an answer, /clear forgets the conversation, Ctrl-D or /exit leaves."


def chat(options: argparse.Namespace) -> int:
    """Talk until the user leaves, or ask the one thing that was given."""
    with connect(options) as client:
        model = options.model or _choose_model(client)
        conversation = Conversation(client, model, options)
        if options.prompt is not None:
            return _ask_once(conversation, options.prompt, as_json=options.json)
        print_line(f"{model}. {_HELP}")
        _talk(conversation)
    return 0


def _ask_once(conversation: Conversation, prompt: str, *, as_json: bool) -> int:
    if not as_json:
        _show(conversation.ask(prompt))
        return 0
    content = "".join(conversation.ask(prompt))
    print_json({"model": conversation.model, "content": content, "usage": conversation.usage})
    return 0


def _talk(conversation: Conversation) -> None:
    with suppress(ImportError):
        __import__("readline")  # gives `input` its history and line editing, where there is one
    while True:
        try:
            line = input("\n> ").strip()
        except EOFError:
            print_line()
            return
        except KeyboardInterrupt:
            print_line(f"\n{_HELP}")
            continue
        if line in {"/exit", "/quit", "/bye"}:
            return
        if line == "/clear":
            conversation.clear()
        elif line in {"/help", "/?"}:
            print_line(_HELP)
        elif line:
            try:
                _show(conversation.ask(line))
            except KeyboardInterrupt:
                print_line(" [stopped]")
            except RemoteError as error:
                print_line(f"\n{error.message}")


def _show(pieces: Iterator[str]) -> None:
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print_line()


def _choose_model(client: httpx.Client) -> str:
    """The server's default, else a loaded model, else the first on disk that has not failed."""
    default = client.get("/admin/api/plan")
    if default.is_success:
        return str(default.json()["model"])
    # It has none, or says that only to operators: what is loaded is not to be known then either.
    usage = client.get("/admin/api/models")
    known = client.get("/v1/models")
    require_success(known)
    rows = usage.json() if usage.is_success else []
    states = {model["name"]: model["state"] for model in rows}
    names = [str(model["root"]) for model in known.json()["data"] if model["kind"] == "generate"]
    if not names:
        raise RemoteError("The server has no model; `penstock pull smollm2` fetches a first one.")
    return min(names, key=lambda name: _PREFERENCE.get(states.get(name, "absent"), 2))


class Conversation:
    """What was said so far; each question adds itself and its answer."""

    def __init__(self, client: httpx.Client, model: str, options: argparse.Namespace) -> None:
        self.model = model
        self.usage: dict[str, Any] | None = None  # of the latest answer
        self._client = client
        self._system = options.system
        self._limits = {
            name: value
            for name in ("max_tokens", "temperature")
            if (value := getattr(options, name)) is not None
        }
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._messages: list[dict[str, str]] = []
        if self._system:
            self._messages.append({"role": "system", "content": self._system})

    def ask(self, question: str) -> Iterator[str]:
        """The answer in pieces. One that is stopped half-way stays in the history as it is."""
        self._messages.append({"role": "user", "content": question})
        answer: list[str] = []
        try:
            for piece in self._stream():
                answer.append(piece)
                yield piece
        finally:
            if answer:
                self._messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self._messages.pop()

    def _stream(self) -> Iterator[str]:
        body = {
            "model": self.model,
            "messages": self._messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._limits,
        }
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            require_success(response)
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RemoteError(str(event["error"]["message"]))
                self.usage = event.get("usage") or self.usage
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""
