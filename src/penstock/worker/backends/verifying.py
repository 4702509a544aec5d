"""Drafts against the tokens that the model chooses: one stays while it is that very token.

    rows       newest | d1 | d2 | d3        row i is sampled as if d1 .. di were right
    sampled      t0   | t1 | t2 | t3
    kept         t0, and t1 if d1 = t0, and t2 if d2 = t1 too, ...

Every row draws with the number of its own seed and position, so what is kept is what one row after
the other would have given, whatever was proposed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.wire import Output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.wire import TokenLogprobs
    from penstock.worker.core.backend import StepResult
    from penstock.worker.core.plan import Plan, Slice


def verified_rows(plan: Plan) -> tuple[list[int], list[Slice]]:
    """Rows of the logits from which a token is sampled, and whose: one with drafts stands there
    once for each of its rows."""
    rows: list[int] = []
    samplers: list[Slice] = []
    end = 0
    for piece in plan.slices:
        end += piece.logit_rows
        if piece.samples:
            count = 1 + len(piece.drafts)
            rows += range(end - count, end)
            samplers += [piece] * count
    return rows, samplers


def ahead_of(samplers: list[Slice]) -> Iterator[tuple[Slice, int]]:
    """Each row's slice, and how many of its drafts come before the row's token."""
    before: Slice | None = None
    ahead = 0
    for piece in samplers:
        ahead = ahead + 1 if piece is before else 0
        before = piece
        yield piece, ahead


def take_verified(
    samplers: list[Slice],
    tokens: list[int],
    logprobs: list[TokenLogprobs | None],
    result: StepResult,
) -> None:
    """Sampled tokens as outputs: a row's counts if all drafts before it were right."""
    right = True
    for (piece, ahead), token, scores in zip(ahead_of(samplers), tokens, logprobs, strict=True):
        if not ahead:
            output = result.outputs.setdefault(piece.request_id, Output(piece.request_id))
            output.tokens, output.logprobs, right = [], [] if scores else None, True
        elif right:
            right = piece.drafts[ahead - 1] == output.tokens[-1]
        if right:
            output.tokens.append(token)
            if output.logprobs is not None and scores is not None:
                output.logprobs.append(scores)
