"""Layers that keep a state of fixed size instead of keys: what they store, and which states a step reads and writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

NO_STATE = -1
"""Stands for a slot before the first token of a sequence, where all states are zero."""


@dataclass(frozen=True, slots=True)
class StateLayer:
    """The state of one layer: the shapes of its float32 tensors."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one state."""
        return sum(math.prod(shape) for shape in self.shapes) * torch.float32.itemsize


class StateSegment(NamedTuple):
    """Consecutive tokens of a batch that belong to one sequence.

    They follow the state in the slot ``source``, and the state after them goes to the slot ``target``, which may be the
    same. A segment may read what an earlier one of its sequence and step has written.
    """

    start: int
    end: int
    source: int
    target: int
    num_chained: int = 0
    """Number of a sequence's segments, which follow one another, for the first of them; 0 for the others.

    Those of one sequence are computed in their order, beside those of others."""


NUM_FIELDS = len(StateSegment._fields)


class LayerStates(NamedTuple):
    """The states of one step as the kernels of the layers read them."""

    layers: Sequence[Sequence[Tensor]]
    """As in ``StateStep``."""
    segments: Tensor
    """``[any, 5]`` int64: those of a ``StateStep``, and any number of zeros, which are segments without tokens."""
    in_chunks: bool = False
    """True if many tokens of a sequence may be computed together, see ``kernels.recurrent.gated_delta``."""


@dataclass(frozen=True)
class StateStep:
    """The states of one step."""

    layers: Sequence[Sequence[Tensor]]
    """The tensors of each layer that has a state, ``[slots, …]``."""
    segments: Sequence[StateSegment]
    """All tokens of the batch, in its order."""

    table: Tensor | None = None
    """The segments and zeros behind them ``[segments or more, 5]`` where a captured step reads them."""

    def list_segments(self) -> Tensor:
        """Return the segments as an int64 tensor ``[segments, 5]`` on the host."""
        return torch.tensor(self.segments, dtype=torch.int64)

    @cached_property
    def groups(self) -> list[list[StateSegment]]:
        """The segments in groups of equal length, none of which reads what another of its group writes.

        All of a group begin with a state, or none does. The groups are in an order in which they can be computed.
        """
        depths: dict[int, int] = {}
        groups: dict[tuple[int, int, bool], list[StateSegment]] = {}
        for segment in self.segments:
            is_first = segment.source == NO_STATE
            depth = 0 if is_first else depths.get(segment.source, 0)
            depths[segment.target] = depth + 1
            groups.setdefault((depth, segment.end - segment.start, is_first), []).append(segment)
        return [groups[key] for key in sorted(groups)]
