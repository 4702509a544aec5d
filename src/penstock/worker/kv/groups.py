"""Layer groups: attention layers whose KV has the same shape and the same lifetime.

Each group has blocks of its own size in an address range of its own, and a sequence has one table
of blocks per group. How long a block is needed is the group's to say: of full attention for as long
as the sequence runs, of a sliding window until the window has passed it.

Layers with a recurrent state keep no blocks. Together they are the third kind of group: a sequence
has one slot of it, of the same size at any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.catalog.states import NOMINAL_TOKEN_BYTES
from penstock.memory.cost import MAX_CHUNK_TOKENS, MAX_TOKENS, GroupCost, KvCost

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.catalog.kv_formats import KvFormat


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """What a group keeps for a token, and for how long."""

    layers: tuple[int, ...]  # the model's own numbers
    window: int | None  # tokens that a row sees, itself included; None: all
    token_bytes: int
    block_tokens: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.token_bytes * self.block_tokens

    @property
    def needs_all(self) -> bool:
        """Every row reads all blocks before it: a prefix is of use only as far as it has no gap."""
        return self.window is None

    def admission_blocks(self, tokens: int) -> int:
        """Blocks that a sequence of so many tokens takes when it is admitted; it takes the others,
        which do not stay, as it is computed."""
        return -(-tokens // self.block_tokens) if self.needs_all else 0

    def max_tokens(self, blocks: int) -> int:
        """The longest sequence that so many addresses serve."""
        return blocks * self.block_tokens if self.needs_all else MAX_TOKENS

    def first_needed_block(self, position: int) -> int:
        """The first block that a row at `position`, or any after it, reads."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.block_tokens


def split_layers(
    token_bytes: Mapping[int, int],
    windows: Mapping[int, int | None],
    block_tokens: int,
    context: int,
    form: KvFormat,
) -> tuple[LayerGroup, ...]:
    """Groups of layers by their windows; a window as long as the served context is none.

    The group of full attention comes first, if there is one, then windows, the longest first.
    """
    members: dict[int | None, list[int]] = {}
    for layer in token_bytes:
        window = windows[layer]
        members.setdefault(None if window is None or window >= context else window, []).append(
            layer
        )
    if not members:  # no attention: blocks stand for tokens, and nothing is in them
        return (LayerGroup((), None, NOMINAL_TOKEN_BYTES, block_tokens),)
    ordered = sorted(members.items(), key=lambda item: (item[0] is not None, -(item[0] or 0)))
    sizes = [sum(token_bytes[layer] for layer in layers) for _, layers in ordered]
    return tuple(
        LayerGroup(tuple(layers), window, form.token_bytes(size, block_tokens), block_tokens)
        for (window, layers), size in zip(ordered, sizes, strict=True)
    )


def cost_of(groups: Iterable[LayerGroup], step_tokens: int, state_bytes: int = 0) -> KvCost:
    """What sequences cost that are computed in steps of so many tokens, and have such a state."""
    groups = tuple(groups)
    return KvCost(
        groups=tuple(GroupCost(group.block_bytes, group.window) for group in groups),
        block_tokens=groups[0].block_tokens,
        chunk_tokens=min(step_tokens, MAX_CHUNK_TOKENS),
        state_bytes=state_bytes,
    )
