"""Log-probabilities as the two OpenAI protocols write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock import wire
    from penstock.server.pipeline.pieces import Piece
    from penstock.text.tokenizer import Tokenizer

# JSON has no infinity; a token that a mask has ruled out gets what vLLM's users know.
_LOWEST = -9999.0


def _number(logprob: float) -> float:
    return max(logprob, _LOWEST)


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The token's text, or `bytes:\\x..` as OpenAI writes what is only part of a character."""
    raw = tokenizer.token_bytes(token)
    try:
        # A special token has no text of its own in an answer, but it has a name.
        return raw.decode() or tokenizer.token(token) or ""
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, piece: Piece) -> list[dict[str, object]]:
    """The entries of `logprobs.content` in a chat choice."""

    def entry(candidate: wire.Candidate) -> dict[str, object]:
        token = candidate.token
        return {
            "token": token_name(tokenizer, token),
            "logprob": _number(candidate.logprob),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    return [
        {**entry(each.chosen), "top_logprobs": [entry(other) for other in each.top]}
        for each in piece.logprobs
    ]


class CompletionLogprobs:
    """`logprobs` of a completions choice: four lists side by side."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add_prompt(self, prompt: wire.TokenIds, logprobs: list[wire.TokenLogprobs | None]) -> None:
        """The prompt's own tokens; the first one has no probability."""
        offset = 0
        for token, each in zip(prompt, logprobs, strict=True):
            self._add(token, each, offset)
            offset += len(self._tokenizer.token_text(token))

    def add(self, piece: Piece, shift: int) -> None:
        """The tokens of a piece; the answer's text begins at `shift`."""
        for token, each, offset in zip(piece.tokens, piece.logprobs, piece.offsets, strict=True):
            self._add(token, each, shift + offset)

    def _add(self, token: int, each: wire.TokenLogprobs | None, offset: int) -> None:
        self.tokens.append(token_name(self._tokenizer, token))
        self.text_offset.append(offset)
        if each is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(_number(each.chosen.logprob))
        top = each.top[: self._alternatives]
        # As OpenAI has it, the chosen token is among them even if it is not one of the best.
        self.top_logprobs.append(
            {
                token_name(self._tokenizer, candidate.token): _number(candidate.logprob)
                for candidate in [each.chosen, *top]
            }
        )

    def as_dict(self) -> dict[str, object]:
        """The JSON object."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
