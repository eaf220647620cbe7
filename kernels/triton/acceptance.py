"""The walk along accepted guesses, one program for each branch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _accept(TOKENS, PARENTS, DRAWN, STARTS, LENGTHS, PATHS, OUT, guesses, BLOCK: tl.constexpr):
    branch = tl.program_id(0).to(tl.int64)
    start, end = tl.load(STARTS + branch), tl.load(STARTS + branch + 1)
    index = tl.arange(0, BLOCK)
    inside = index < end - start - 1
    token = tl.load(TOKENS + start + 1 + index, mask=inside, other=-1)
    parent = tl.load(PARENTS + start + 1 + index, mask=inside, other=-2)
    path = tl.full([BLOCK], -1, tl.int32)
    met = tl.full([BLOCK], -1, tl.int64)

    node, length, going = -1, 0, True
    due = tl.load(DRAWN + start)
    while going:
        # Children of one node come in the order of their indices, so the first of two equal ones is the smaller.
        child = tl.min(tl.where((parent == node) & (token == due), index, BLOCK))
        going = child < BLOCK
        if going:
            path = tl.where(index == length, child, path)
            met = tl.where(index == length, due, met)
            due = tl.load(DRAWN + start + 1 + child)
            node = child
            length += 1
    tl.store(LENGTHS + branch, length)
    tl.store(PATHS + branch * guesses + index, path, mask=index < guesses)
    tl.store(OUT + branch * (guesses + 1) + index, tl.where(index == length, due, met), mask=index <= guesses)


def accept(tokens: Tensor, parents: Tensor, drawn: Tensor, starts: Tensor, guesses: int) -> tuple[Tensor, ...]:
    """See ``kernels.sampling.acceptance.accept``."""
    branches, device = len(starts) - 1, tokens.device
    lengths = torch.empty(branches, dtype=torch.int32, device=device)
    paths = torch.empty(branches, guesses, dtype=torch.int32, device=device)
    out = torch.empty(branches, guesses + 1, dtype=torch.int64, device=device)
    if branches:
        _accept[(branches,)](
            tokens, parents, drawn, starts, lengths, paths, out, guesses,
            BLOCK=triton.next_power_of_2(guesses + 1), num_warps=1,
        )  # fmt: skip
    return lengths, paths, out
