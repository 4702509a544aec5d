"""A response of `/v1/responses`: its body as it grows, its events, and how it is stored."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import StoreUnavailable
from penstock.server.http.errors import event
from penstock.server.http.threads import run_in_thread, run_in_thread_if_large
from penstock.server.pipeline.answers import Answer
from penstock.server.pipeline.pieces import FinishReason
from penstock.server.protocols.logprobs import chat_logprobs
from penstock.server.protocols.openai.reasoning_fields import shows_reasoning
from penstock.server.protocols.openai.response_store import StoredResponse
from penstock.server.protocols.openai.responses_fields import custom_tools, namespaces, said_tools
from penstock.server.protocols.openai.responses_items import OutputItems

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.server.pipeline.generation import Job, Usage
    from penstock.server.pipeline.pieces import Piece
    from penstock.server.protocols.openai.response_store import ResponseStore
    from penstock.server.protocols.openai.responses_fields import ResponseFields


class ResponseAnswer(Answer):
    """A response: its body as it grows, and its events."""

    def __init__(self, job: Job, fields: ResponseFields, owner: str, store: ResponseStore) -> None:
        self.job = job
        key = secrets.token_hex(24)
        self.id = f"resp_{key}"
        self.body = _body(self.id, job, fields)
        self._owner = owner
        self._store = store if fields.store is not False else None
        self._input = msgspec.json.encode(fields.items())
        self._size = len(self._input) + len(fields.instructions or "") + len(bytes(fields.tools))
        self._items = OutputItems(
            namespaces(fields.tools), shows_reasoning(fields), key, custom_tools(fields.tools)
        )
        self._finish: FinishReason | None = None
        self._number = 0  # of the next event

    # --- whole ---------------------------------------------------------------------------------

    def document(self, choices: list[list[Piece]], usage: Usage) -> dict[str, Any]:
        """The response with all of its output."""
        [pieces] = choices
        for piece in pieces:
            self._take(piece)
        self._end(usage)
        return self.body

    async def whole(self, choices: list[list[Piece]], usage: Usage, size: int) -> bytes:
        """The document encoded, once it is stored, so that a client can go on from it at once."""
        await run_in_thread_if_large(size, partial(self.document, choices, usage))
        await self.save_if_possible()
        return await run_in_thread_if_large(size, partial(msgspec.json.encode, self.body))

    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        self._finish = piece.finish
        logprobs = chat_logprobs(self.job.tokenizer, piece) if piece.logprobs else []
        return self._items.take_all(piece.parts, logprobs)

    def fail(self, error: PenstockError) -> None:
        """It could not be made."""
        self._items.finish("incomplete")
        self.body |= {
            "status": "failed",
            "output": self._items.items,
            "error": _error(error),
        }

    async def save(self, *, finished: bool = True) -> None:
        """Store it as it is."""
        if self._store is None:
            return
        body = await run_in_thread(self._size, partial(msgspec.json.encode, self.body))
        previous = self.body["previous_response_id"]
        await self._store.put(
            StoredResponse(self.id, previous, self._owner, finished, body, self._input)
        )

    async def save_if_possible(self) -> None:
        """Store it; where the disk does not take it, the answer is as good and says so."""
        try:
            await self.save()
        except StoreUnavailable:
            self.body["store"] = False

    async def save_end(self) -> None:
        """Store how it ended, for a client who asks later. An answer that the disk does not take
        is lost; that it is must still be heard, so it is remembered until the disk does."""
        try:
            await self.save()
        except StoreUnavailable as error:
            if self.body["status"] in ("completed", "incomplete"):
                self.body |= {"status": "failed", "error": _error(error)}
            said: dict[str, Any] = {"instructions": None, "metadata": {}, "tools": [], "output": []}
            body = msgspec.json.encode({**self.body, **said})
            assert self._store is not None
            self._store.hold(StoredResponse(self.id, None, self._owner, True, body, b"[]"))

    def _end(self, usage: Usage) -> list[dict[str, Any]]:
        cut_short = self._finish is FinishReason.LENGTH
        status = "incomplete" if cut_short else "completed"
        events = self._items.finish(status)
        self.body |= {
            "status": status,
            "completed_at": None if cut_short else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut_short else None,
            "output": self._items.items,
            "usage": _usage(usage),
        }
        return events

    # --- streamed ------------------------------------------------------------------------------

    def opening(self, usage: Usage) -> bytes:
        """The response before it has said anything."""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._say({"type": kind, "response": self.body}) for kind in kinds)

    def events(self, piece: Piece) -> bytes:
        """The events of one piece."""
        return b"".join(map(self._say, self._take(piece)))

    async def closing(self, usage: Usage) -> bytes:
        """The end of the last item, and the response as it is stored."""
        said = b"".join(self._say(each) for each in self._end(usage))
        await self.save_if_possible()
        last = {"type": f"response.{self.body['status']}", "response": self.body}
        return said + await run_in_thread_if_large(self._size, partial(self._say, last))

    def failing(self, error: PenstockError) -> bytes:
        """The response as far as it came, and why not further."""
        self.fail(error)
        return self._say({"type": "response.failed", "response": self.body})

    def _say(self, content: dict[str, Any]) -> bytes:
        numbered = {**content, "sequence_number": self._number}
        self._number += 1
        return event(numbered, str(content["type"]))


def _error(error: PenstockError) -> dict[str, str]:
    return {"code": error.code, "message": error.message}


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _body(response_id: str, job: Job, fields: ResponseFields) -> dict[str, Any]:
    """The response as it begins, with what was asked for repeated in it."""
    reasoning = fields.reasoning
    wanted = None if fields.text is None else fields.text.format
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(fields.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.requested_tokens(),
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.said_metadata(),
        "model": job.card.name,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "store": fields.store is not False,
        "temperature": job.sampling.temperature,
        "text": {"format": {"type": "text"} if wanted is None else wanted.said()},
        "tool_choice": fields.said_tool_choice() or "auto",
        "tools": said_tools(fields.tools),
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": job.sampling.top_p,
        "truncation": fields.truncation or "disabled",
        "usage": None,
    }
