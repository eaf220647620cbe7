"""Draft tokens on a device: their candidates, and trees that grow level by level without the host.

``engine.speculation.drafters.proposal`` defines the candidates and their probabilities, and ``tree_draft`` the trees.
The order of ties is defined: of equal logits, and of equal scores, the smaller token comes first, and of nodes of equal
values the earlier one. Without a GPU plain torch does the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.draft_trees import NO_NODE, NODES, CandidateRules, TreeBuffers
from kernels.common.noise import SAMPLE, gumbel_noise, noise_streams


def rank_drafts(
    logits: Tensor, floats: Tensor, ints: Tensor, ahead: Tensor, width: int, rules: CandidateRules
) -> tuple[Tensor, Tensor]:
    """Return draft tokens and their acceptance probabilities, int64 and float64 ``[rows, width]``, the best first.

    ``logits``: float32 ``[rows, vocab]``, whose last axis has stride 1, equally many rows for each branch, one branch
    after the other. ``floats`` ``[3, branches]``: temperature, top-p and min-p, float64; ``ints`` ``[4, branches]``:
    top-k, seed, key and position, to which ``ahead`` ``[branches]`` is added. A probability is 0 if the filters exclude
    the token or it is no candidate, and NaN if the logits are not finite.
    """
    if logits.is_cuda:
        from kernels.triton import draft_tree as on_gpu

        return on_gpu.rank_drafts(logits, floats, ints, ahead, width, rules, SAMPLE)
    rows = len(logits) // len(ahead)
    floats, ints = floats.repeat_interleave(rows, dim=1), ints.repeat_interleave(rows, dim=1)
    ahead = ahead.repeat_interleave(rows)
    # A stable sort keeps equal logits in the order of their tokens.
    found = logits.sort(dim=1, descending=True, stable=True)
    values, tokens = (x[:, : rules.max_candidates] for x in (found.values, found.indices))
    temperature, top_p, min_p = floats[..., None]
    top = values[:, :1]
    gaps = (values.double() - top).nan_to_num(-torch.inf)
    gaps = torch.where(gaps < -rules.reach * temperature.clamp_min(1), -torch.inf, gaps)
    kept = (torch.arange(gaps.shape[1], device=gaps.device) < ints[0][:, None]) & (gaps > -torch.inf)
    weights = torch.where(kept, (gaps / torch.where(temperature > 0, temperature, 1)).exp(), 0)
    mass = weights.cumsum(dim=1)
    filtered = kept & (mass - weights < top_p * mass[:, -1:]) & (weights >= min_p) & (weights > 0)
    kept = torch.where((top_p >= 1) & (min_p <= 0), kept, filtered)
    streams = noise_streams(ints[1].numpy(), ints[2].numpy(), (ints[3] + ahead).numpy(), SAMPLE)
    noise = torch.from_numpy(gumbel_noise(streams[:, None], tokens.numpy()))
    scores = torch.where(kept, gaps + rules.noise * temperature * noise, -torch.inf)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :width]
    probs = torch.where(kept, scores.softmax(dim=1), 0).gather(1, order)
    return tokens.gather(1, order), torch.where(top.isfinite(), probs, torch.nan)


def grow(tokens: Tensor, probs: Tensor, buffers: TreeBuffers, floor: float, *, is_first: bool) -> None:
    """Add the candidates of the latest level to the trees, keep the best nodes, and choose the next level's rows.

    ``tokens`` and ``probs``: ``rank_drafts`` of the latest level's rows, all ``wide`` of each branch, or if
    ``is_first`` one for each branch, which begins the tree. A node is expanded if it is one of the best so far, has a
    value of ``floor`` or more, and does not end the branch.

    One piece: on the CPU it is the definition of one kernel, in its order.
    """
    if tokens.is_cuda:
        from kernels.triton import draft_tree as on_gpu

        on_gpu.grow(tokens, probs, buffers, floor, is_first=is_first)
        return
    branches, wide, device = buffers.branches, buffers.wide, tokens.device
    rows, width = len(tokens) // branches, tokens.shape[1]
    most, depth, is_chain, end = buffers.params[:4, :, None]
    level = torch.zeros_like(most) if is_first else buffers.level[:, None].clone()
    nodes = buffers.row_nodes.view(branches, wide)[:, :rows]
    nodes = torch.full_like(nodes, -1) if is_first else nodes.clone()
    old, old_values = buffers.tree.clone(), buffers.values.clone()
    count = torch.zeros_like(most) if is_first else old[:, -1:]
    is_old = torch.arange(NODES, device=device) < count

    node = nodes.repeat_interleave(width, dim=1)
    new_probs = probs.view(branches, -1)
    rank = torch.arange(width, device=device).repeat(rows)
    is_new = (node > NO_NODE) & ((is_chain == 0) | (rank == 0)) & (most > 0) & (new_probs > 0)
    bases = torch.where(node < 0, 1.0, old_values.gather(1, node.clamp_min(0)))
    exists = torch.cat((is_old, is_new), dim=1)
    token = torch.cat((old[:, :NODES], tokens.view(branches, -1)), dim=1)
    parent = torch.cat((old[:, NODES : 2 * NODES], node), dim=1)
    prob = torch.cat((old[:, 2 * NODES : 3 * NODES].view(torch.float64), new_probs), dim=1)
    value = torch.where(exists, torch.cat((old_values, bases * new_probs), dim=1), -1.0)

    ranks = value.sort(dim=1, descending=True, stable=True).indices.argsort(dim=1)
    kept = exists & (ranks < most)
    index = kept.cumsum(dim=1) - 1
    parent = torch.where(exists & (parent >= 0), parent, -1)
    parent = torch.where(parent < 0, -1, index.gather(1, parent.clamp_min(0)))
    is_last = (token[..., None] == buffers.params[4:].T[:, None]).any(dim=2)
    is_grown = kept & (value >= floor) & ~is_last & (level + 1 < depth)
    is_grown[:, :NODES] = False
    order = is_grown.cumsum(dim=1) - 1
    is_grown &= order < wide

    def put(out: Tensor, where: Tensor, index: Tensor, values: Tensor) -> None:
        """Write values to their indices; those that are not written go behind the end."""
        padded = torch.cat((out, out[:, :1]), dim=1)
        padded.scatter_(1, torch.where(where, index, out.shape[1]), values)
        out.copy_(padded[:, :-1])

    for place, values in enumerate((token, parent, prob.view(torch.int64))):
        put(buffers.tree[:, place * NODES : (place + 1) * NODES], kept, index, values)
    put(buffers.values, kept, index, value)
    buffers.tree[:, -1] = kept.sum(dim=1)

    row = torch.arange(branches, device=device)[:, None] * wide
    lanes = torch.arange(wide, device=device)
    seen = buffers.sees.view(branches, wide, -1).clone()
    parents = row.expand(branches, wide).clone()
    chosen, row_tokens = torch.full_like(parents, NO_NODE), torch.zeros_like(parents)
    width_of = torch.arange(rows, device=device).repeat_interleave(width)
    own_rows = torch.cat((row.expand(branches, NODES), row + width_of), dim=1)
    put(chosen, is_grown, order, index)
    put(row_tokens, is_grown, order, token)
    put(parents, is_grown, order, own_rows)
    bits = level * wide + lanes
    words = torch.arange(seen.shape[2], device=device)
    own_bits = torch.where(words == (bits // 32)[..., None], (1 << (bits % 32))[..., None], 0)
    before = seen.gather(1, (parents - row)[..., None].expand(-1, -1, seen.shape[2]))
    before = before if not is_first else torch.zeros_like(before)
    before = torch.where((chosen >= 0)[..., None], before, 0)
    buffers.sees.view(branches, wide, -1).copy_(before | own_bits.int())
    buffers.row_nodes.view(branches, wide).copy_(chosen)
    buffers.row_tokens.view(branches, wide).copy_(row_tokens)
    buffers.parent_rows.view(branches, wide).copy_(parents)
    buffers.positions.view(branches, wide).copy_((end + level).expand(-1, wide))
    buffers.slots.view(branches, wide).copy_(torch.arange(branches, device=device)[:, None] * buffers.room + bits)
    buffers.level.copy_(level[:, 0] + 1)
    buffers.ends.copy_((level[:, 0] + 1) * wide)
