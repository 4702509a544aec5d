"""What chats and completions have in common in OpenAI's protocol: the head, the chunks, the end."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from penstock.server.http.errors import error_object, event
from penstock.server.pipeline.answers import DONE, Answer
from penstock.server.pipeline.pieces import FinishReason

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.server.fields.generation import GenerationFields
    from penstock.server.pipeline.generation import Job, Usage
    from penstock.server.pipeline.pieces import Piece


def openai_finish(finish: FinishReason | None) -> str | None:
    """`finish_reason`, which does not tell stop strings apart."""
    if finish is None:
        return None
    return {FinishReason.LENGTH: "length", FinishReason.CALLS: "tool_calls"}.get(finish, "stop")


def openai_usage(usage: Usage) -> dict[str, object]:
    """`usage`, with the grant and the drafts that steps have verified as an extension."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_drafts,
            "rejected_prediction_tokens": usage.rejected_drafts,
        },
        "penstock": {
            "max_tokens": usage.granted_tokens,
            "drafted_tokens": usage.accepted_drafts + usage.rejected_drafts,
        },
    }


class OpenAIAnswer(Answer):
    """A list of choices, each in pieces."""

    def __init__(
        self, job: Job, fields: GenerationFields, fingerprint: str, kind: str, prefix: str
    ) -> None:
        self._job = job
        options = fields.stream_options
        self._include_usage = bool(options is not None and options.include_usage)
        self._head: dict[str, object] = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": job.card.name,
            "system_fingerprint": fingerprint,
        }

    def document(self, choices: list[list[Piece]], usage: Usage) -> dict[str, object]:
        """All choices and the usage."""
        written = [self._choice(index, pieces) for index, pieces in enumerate(choices)]
        return {**self._head, "choices": written, "usage": openai_usage(usage)}

    def _choice(self, index: int, pieces: list[Piece]) -> dict[str, object]:
        raise NotImplementedError

    def _chunk(self, choice: dict[str, object]) -> bytes:
        chunk: dict[str, object] = {**self._head, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return event(chunk)

    async def closing(self, usage: Usage) -> bytes:
        """The usage, if asked for, and the end."""
        if not self._include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": openai_usage(usage)}) + DONE

    def failing(self, error: PenstockError) -> bytes:
        """One last event."""
        return event(error_object(error))
