"""Which guesses of a batch were right, found where the drawn tokens are (``engine.speculation.verify`` for a batch)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Accepted(NamedTuple):
    """The guesses that plain decoding would have drawn."""

    lengths: Tensor
    """int32 ``[branches]``: how many."""
    paths: Tensor
    """int32 ``[branches, guesses]``: indices of a branch's accepted guesses among its own, then -1."""
    tokens: Tensor
    """int64 ``[branches, guesses + 1]``: those guesses and the token drawn after the last of them, then -1."""


def accept(tokens: Tensor, parents: Tensor, drawn: Tensor, starts: Tensor, guesses: int) -> Accepted:
    """Walks every branch's tree of guesses as far as the draws meet it.

    A branch's rows are ``starts[branch]`` to ``starts[branch + 1]`` (int64 ``[branches + 1]``): one for its last token,
    then one for each of its guesses, at most ``guesses``. In them ``tokens`` has the guesses, ``parents`` (int32) the
    index of the one before each among the branch's guesses, -1 for its last token, and ``drawn`` the token drawn after
    each row: int64 ``[rows]``. The first row's guess and parent are not looked at. Of two equal guesses the first
    counts.
    """
    if tokens.is_cuda:
        from kernels.triton import acceptance as on_gpu

        return Accepted(*on_gpu.accept(tokens, parents, drawn, starts, guesses))
    branches = len(starts) - 1
    lengths = torch.zeros(branches, dtype=torch.int32)
    paths = torch.full((branches, guesses), -1, dtype=torch.int32)
    out = torch.full((branches, guesses + 1), -1)
    for branch, (start, end) in enumerate(zip(starts.tolist(), starts[1:].tolist(), strict=False)):
        own, before = tokens[start + 1 : end], parents[start + 1 : end]
        node, length = -1, 0
        out[branch, 0] = drawn[start]
        while len(hits := ((before == node) & (own == drawn[start + 1 + node])).nonzero()):
            node = int(hits[0])
            paths[branch, length] = node
            length += 1
            out[branch, length] = drawn[start + 1 + node]
        lengths[branch] = length
    return Accepted(lengths, paths, out)
