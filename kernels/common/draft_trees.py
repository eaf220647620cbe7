"""The state of trees of draft tokens that grow on a device, level by level, as the kernels take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

NODES = 32
"""Maximum number of nodes of a tree."""
NO_NODE = -2
"""Node of a row that pads a level."""


class CandidateRules(NamedTuple):
    """The tokens of a distribution that may be draft tokens, and how they are ranked."""

    max_candidates: int
    """The likeliest tokens that are considered, a power of two."""
    reach: float
    """Maximum distance of a candidate's logit from the largest, over the temperature if that is above 1."""
    noise: float
    """Weight of the Gumbel noise."""


@dataclass(frozen=True, slots=True)
class TreeBuffers:
    """The trees of some branches, and the rows of their latest level. int64 unless stated otherwise.

    Each level has ``wide`` rows a branch; those without a node are padding.
    """

    params: Tensor
    """``[4 + ends, branches]``: maximum numbers of nodes and of levels, 1 for a chain, the position of the first
    level's rows, and the tokens that end the branch (-1 is none). Padding has no nodes."""
    tree: Tensor
    """``[branches, 3 * NODES + 1]``: tokens, parents and probabilities (the bits of a float64), and their number."""
    values: Tensor
    """``[branches, NODES]`` float64: the products of the probabilities on the nodes' paths."""
    row_nodes: Tensor
    """``[branches * wide]``: the node of each row, or ``NO_NODE``."""
    level: Tensor
    """``[branches]``: number of levels."""
    ends: Tensor
    """``[branches]``: number of entries that the rows attend to, those of all levels."""
    parent_rows: Tensor
    """``[branches * wide]``: the row of the level before that each row continues; of the first level, which has one
    row a branch, the branch's first."""
    row_tokens: Tensor
    """``[branches * wide]``."""
    positions: Tensor
    """``[branches * wide]``."""
    slots: Tensor
    """``[branches * wide]``: slots of the rows' entries, of which each branch has ``room``."""
    sees: Tensor
    """``[branches * wide, words]`` int32: bit ``i % 32`` of word ``i // 32`` is 1 if a row sees its branch's entry
    ``i``."""
    wide: int
    room: int

    @property
    def branches(self) -> int:
        """Number of branches."""
        return len(self.level)
