"""The memory behind a model's KV: one arena for each layer group, and one for recurrent states."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from penstock.worker.kv.arena import Arena, BlockLayout
from penstock.worker.kv.groups import cost_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from penstock.catalog.kv_formats import KvFormat
    from penstock.memory.cost import KvCost
    from penstock.worker.kv.arena import ByteArena, LayerGeometry
    from penstock.worker.kv.device import KvDevice
    from penstock.worker.kv.groups import LayerGroup
    from penstock.worker.kv.layout.layer_blocks import LayerBlocks
    from penstock.worker.kv.states.memory import StateMemory


class KvMemory:
    """Addresses for all groups; nothing is committed yet."""

    def __init__(  # noqa: PLR0913 - a part for each kind of memory
        self,
        groups: Sequence[LayerGroup],
        layers: Mapping[int, LayerGeometry],
        form: KvFormat,
        device: KvDevice,
        blocks: Sequence[int],
        extent_bytes: int | None = None,
        states: StateMemory | None = None,
    ) -> None:
        """`layers` by the model's own numbers; `blocks` of each group."""
        self.states = states
        self.groups = tuple(groups)
        self.layers = tuple(layers.values())
        self.format = form
        self.block_tokens = groups[0].block_tokens
        self.arenas = tuple(
            Arena(
                BlockLayout(tuple(layers[i] for i in group.layers), self.block_tokens, form),
                count,
                device,
                extent_bytes,
            )
            for group, count in zip(groups, blocks, strict=True)
        )
        self.device: torch.device = self.arenas[0].place
        self._places = {
            layer: (number, slot)
            for number, group in enumerate(groups)
            for slot, layer in enumerate(group.layers)
        }

    @property
    def committed_bytes(self) -> int:
        """Memory behind all arenas now."""
        return sum(arena.committed_bytes for arena in self._all)

    @property
    def state_bytes(self) -> int:
        """Of a sequence's recurrent state."""
        return 0 if self.states is None else self.states.block_bytes

    def cost(self, step_tokens: int) -> KvCost:
        """What sequences cost that are computed in steps of so many tokens."""
        return cost_of(self.groups, step_tokens, self.state_bytes)

    @property
    def _all(self) -> tuple[ByteArena, ...]:
        return self.arenas if self.states is None else (*self.arenas, self.states)

    def blocks(self, layer: int) -> LayerBlocks:
        """Where a layer's keys and values lie."""
        group, slot = self._places[layer]
        return self.arenas[group].layers[slot]

    def group_of(self, layer: int) -> int:
        """The group whose tables a layer reads."""
        return self._places[layer][0]

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """What is committed meanwhile counts against every limit, but its pages are not fetched."""
        with ExitStack() as stack:
            for arena in self._all:
                stack.enter_context(arena.untouched())
            yield
