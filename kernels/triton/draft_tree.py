"""Candidates of draft tokens, and the growth of trees of them, in Triton; ``kernels.sampling.draft_tree`` says which.

Logits and their tokens are sorted as one integer: the upper half orders as the logit does, the lower one falls with the
token. So no two are equal, and the order of ties is that of the tokens. Programs sort chunks of a row in parallel, and
one more sorts the best ones of all chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.draft_trees import NODES, CandidateRules, TreeBuffers
from kernels.triton.noise import gumbel_noise, hash_noise, noise_stream

_CHUNK = 2048
_MAX_CHUNKS = 128
_LEAST = tl.constexpr(-(1 << 63))


@triton.jit
def _sort_chunks(LOGITS, KEYS, vocab, stride, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """Write the ``COUNT`` largest keys of each chunk of a row."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    x = tl.load(LOGITS + row * stride + token, mask=inside, other=float("-inf"))
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    # A row with NaN has no candidates, and so NaN comes first.
    ordered = tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    best = tl.topk(tl.where(inside, key, _LEAST), COUNT)
    tl.store(KEYS + (row * tl.num_programs(1) + chunk) * COUNT + tl.arange(0, COUNT), best)


@triton.jit
def _rank(
    KEYS, FLOATS, INTS, AHEAD, TOKENS, PROBS, chunks, floats_stride, ints_stride, reach, noise,
    ROWS: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PURPOSE: tl.constexpr,
):  # fmt: skip
    """Filter and rank the candidates of a row. One piece, because each part needs the candidates in registers."""
    row = tl.program_id(0).to(tl.int64)
    branch = row // ROWS
    place = tl.arange(0, SIZE)
    key = tl.load(KEYS + row * chunks * COUNT + place, mask=place < chunks * COUNT, other=_LEAST)
    if SIZE > COUNT:
        key = tl.topk(key, COUNT)
    lane = tl.arange(0, COUNT)
    token = (0x7FFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32)
    ordered = (key >> 32).to(tl.int32)
    x = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    is_token = ordered > -0x80000000
    top = tl.sum(tl.where(lane == 0, x, 0.0))
    is_valid = (top > float("-inf")) & (top < float("inf"))

    temperature = tl.load(FLOATS + branch)
    top_p, min_p = tl.load(FLOATS + floats_stride + branch), tl.load(FLOATS + 2 * floats_stride + branch)
    top_k = tl.load(INTS + branch)
    gap = tl.where(is_valid & is_token, x.to(tl.float64) - top.to(tl.float64), float("-inf"))
    gap = tl.where(gap < -reach * tl.maximum(temperature, 1.0), float("-inf"), gap)
    kept = (lane < top_k) & (gap > float("-inf"))
    weight = tl.where(kept, tl.exp(gap / tl.where(temperature > 0, temperature, 1.0)), 0.0)
    mass = tl.cumsum(weight)
    filtered = kept & (mass - weight < top_p * tl.sum(weight)) & (weight >= min_p) & (weight > 0)
    kept = tl.where((top_p >= 1) & (min_p <= 0), kept, filtered)

    position = tl.load(INTS + 3 * ints_stride + branch) + tl.load(AHEAD + branch)
    seed, noise_key = tl.load(INTS + ints_stride + branch), tl.load(INTS + 2 * ints_stride + branch)
    stream = noise_stream(seed, noise_key, position, PURPOSE)
    score = tl.where(kept, gap + noise * temperature * gumbel_noise(hash_noise(stream, token)), float("-inf"))
    best = tl.max(score)
    total = tl.sum(tl.where(kept, tl.exp(score - best), 0.0))
    for rank in tl.static_range(WIDTH):
        highest = tl.max(score)
        chosen = tl.min(tl.where(score == highest, lane, COUNT))
        prob = tl.where(is_valid, tl.where(highest > float("-inf"), tl.exp(highest - best) / total, 0.0), float("nan"))
        tl.store(TOKENS + row * WIDTH + rank, tl.sum(tl.where(lane == chosen, token, 0)).to(tl.int64))
        tl.store(PROBS + row * WIDTH + rank, prob)
        score = tl.where(lane == chosen, float("-inf"), score)


@triton.jit
def _grow(
    TOKENS, PROBS, PARAMS, TREE, VALUES, ROW_NODES, LEVEL, ENDS, PARENT_ROWS, ROW_TOKENS, POSITIONS, SLOTS, SEES,
    params_stride, tree_stride, num_ends, floor, room,
    FIRST: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, NODES: tl.constexpr,
    LANES: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Add a level to one branch's tree and choose the next level's rows. One piece: the nodes are in registers."""
    branch = tl.program_id(0)
    params = PARAMS + branch
    most, depth = tl.load(params), tl.load(params + params_stride)
    is_chain, end = tl.load(params + 2 * params_stride), tl.load(params + 3 * params_stride)
    tree, values = TREE + branch * tree_stride, VALUES + branch * NODES
    level, count = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if not FIRST:
        level = tl.load(LEVEL + branch).to(tl.int32)
        count = tl.load(tree + 3 * NODES).to(tl.int32)
    lane = tl.arange(0, LANES)
    is_old, new = lane < count, lane - NODES
    token = tl.load(tree + lane, mask=is_old, other=0)
    parent = tl.load(tree + NODES + lane, mask=is_old, other=-1).to(tl.int32)
    prob = tl.load(tree + 2 * NODES + lane, mask=is_old, other=0).to(tl.float64, bitcast=True)
    value = tl.load(values + lane, mask=is_old, other=0.0)

    row, rank = new // WIDTH, new % WIDTH
    is_new = (new >= 0) & (row < ROWS) & ((is_chain == 0) | (rank == 0)) & (most > 0)
    if not FIRST:
        node = tl.load(ROW_NODES + branch * WIDE + row, mask=is_new, other=-2).to(tl.int32)
        is_new &= node >= 0
    else:
        node = tl.where(is_new, -1, -2)
    source = (branch * ROWS + row) * WIDTH + rank
    new_prob = tl.load(PROBS + source, mask=is_new, other=0.0)
    is_new &= new_prob > 0  # False for NaN, too
    base = 1.0
    if not FIRST:
        base = tl.load(values + node, mask=is_new, other=0.0)
    token = tl.where(is_new, tl.load(TOKENS + source, mask=is_new, other=0), token)
    prob, value = tl.where(is_new, new_prob, prob), tl.where(is_new, base * new_prob, value)
    parent = tl.where(is_new, node, parent)
    exists = is_old | is_new

    # Of equal values the earlier node is better.
    value = tl.where(exists, value, -1.0)
    wins = (value[None, :] > value[:, None]) | ((value[None, :] == value[:, None]) & (lane[None, :] < lane[:, None]))
    kept = exists & (tl.sum(wins.to(tl.int32), axis=1) < most)
    index = tl.cumsum(kept.to(tl.int32)) - 1
    is_parent = lane[None, :] == parent[:, None]
    parent = tl.where(parent < 0, -1, tl.sum(tl.where(is_parent, index[None, :], 0), axis=1))

    ends = tl.zeros([LANES], tl.int32)
    for place in range(0, num_ends):
        ends |= (token == tl.load(params + (4 + place) * params_stride)).to(tl.int32)
    grows = kept & is_new & (value >= floor) & (ends == 0) & (level + 1 < depth)
    order = tl.cumsum(grows.to(tl.int32)) - 1
    grows &= order < WIDE
    size = tl.sum(grows.to(tl.int32))
    target = branch * WIDE + order
    parent_row = branch * WIDE + row
    words = tl.arange(0, PADDED)[None, :]
    bit = level * WIDE + order
    seen = tl.where(words == (bit >> 5)[:, None], 1 << (bit & 31)[:, None], 0)
    in_words = words < WORDS
    if not FIRST:
        seen |= tl.load(SEES + parent_row[:, None] * WORDS + words, mask=grows[:, None] & in_words, other=0)
    tl.debug_barrier()  # what follows overwrites what was read

    tl.store(tree + index, token, mask=kept)
    tl.store(tree + NODES + index, parent.to(tl.int64), mask=kept)
    tl.store(tree + 2 * NODES + index, prob.to(tl.int64, bitcast=True), mask=kept)
    tl.store(values + index, value, mask=kept)
    tl.store(tree + 3 * NODES, tl.sum(kept.to(tl.int32)).to(tl.int64))
    tl.store(ROW_NODES + target, index.to(tl.int64), mask=grows)
    tl.store(PARENT_ROWS + target, parent_row.to(tl.int64), mask=grows)
    tl.store(ROW_TOKENS + target, token, mask=grows)
    tl.store(SEES + target[:, None] * WORDS + words, seen, mask=grows[:, None] & in_words)

    # Rows without a node repeat the first one's input, and only they see themselves.
    spare = branch * WIDE + lane
    is_row = lane < WIDE
    is_spare = is_row & (lane >= size)
    tl.store(ROW_NODES + spare, tl.full([LANES], -2, tl.int64), mask=is_spare)
    tl.store(PARENT_ROWS + spare, tl.full([LANES], 0, tl.int64) + branch * WIDE, mask=is_spare)
    tl.store(ROW_TOKENS + spare, tl.zeros([LANES], tl.int64), mask=is_spare)
    bit = level * WIDE + lane
    seen = tl.where(words == (bit >> 5)[:, None], 1 << (bit & 31)[:, None], 0)
    tl.store(SEES + spare[:, None] * WORDS + words, seen, mask=is_spare[:, None] & in_words)
    tl.store(POSITIONS + spare, tl.zeros([LANES], tl.int64) + end + level, mask=is_row)
    tl.store(SLOTS + spare, (branch * room + level * WIDE + lane).to(tl.int64), mask=is_row)
    tl.store(LEVEL + branch, (level + 1).to(tl.int64))
    tl.store(ENDS + branch, ((level + 1) * WIDE).to(tl.int64))


def rank_drafts(
    logits: Tensor, floats: Tensor, ints: Tensor, ahead: Tensor, width: int, rules: CandidateRules, purpose: int
) -> tuple[Tensor, Tensor]:
    """``kernels.sampling.draft_tree.rank_drafts`` of CUDA tensors."""
    rows, vocab = logits.shape
    chunk = max(_CHUNK, triton.next_power_of_2(triton.cdiv(vocab, _MAX_CHUNKS)))
    chunks, count = triton.cdiv(vocab, chunk), rules.max_candidates
    keys = torch.empty(rows, chunks, count, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(rows, width, dtype=torch.int64, device=logits.device)
    probs = torch.empty(rows, width, dtype=torch.float64, device=logits.device)
    _sort_chunks[(rows, chunks)](
        logits, keys, vocab, logits.stride(0), COUNT=count, CHUNK=chunk, num_warps=8 if chunk <= _CHUNK else 16
    )
    size = triton.next_power_of_2(chunks * count)
    _rank[(rows,)](
        keys, floats, ints, ahead, tokens, probs, chunks, floats.stride(0), ints.stride(0), rules.reach, rules.noise,
        ROWS=rows // len(ahead), COUNT=count, SIZE=size, WIDTH=width, PURPOSE=purpose,
        num_warps=max(1, min(16, size // 256)),
    )  # fmt: skip
    return tokens, probs


def grow(tokens: Tensor, probs: Tensor, buffers: TreeBuffers, floor: float, *, is_first: bool) -> None:
    """``kernels.sampling.draft_tree.grow`` of CUDA tensors."""
    branches, rows, width = buffers.branches, len(tokens) // buffers.branches, tokens.shape[1]
    words = buffers.sees.shape[1]
    _grow[(branches,)](
        tokens, probs, buffers.params, buffers.tree, buffers.values, buffers.row_nodes, buffers.level, buffers.ends,
        buffers.parent_rows, buffers.row_tokens, buffers.positions, buffers.slots, buffers.sees,
        buffers.params.stride(0), buffers.tree.stride(0), len(buffers.params) - 4, floor, buffers.room,
        FIRST=is_first, ROWS=rows, WIDE=buffers.wide, WIDTH=width, NODES=NODES,
        LANES=triton.next_power_of_2(NODES + rows * width), WORDS=words, PADDED=triton.next_power_of_2(words),
        num_warps=4,
    )  # fmt: skip
