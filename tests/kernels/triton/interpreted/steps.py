"""Random steps over paged keys, and their attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.common.attention_schedule import (
    NO_TREE,
    AttentionTiles,
    Segments,
    TileBuffers,
    TileShape,
    concat_segments,
    pack_bits,
    plan_tiles,
    shared_prefix_segment,
)
from kernels.common.int4 import INT4
from kernels.common.paged_keys import PagedKeys
from kernels.quantize import dequantize_vectors, quantize_vectors
from tests.kernels.triton.device import DEVICE
from tests.seeds import shift


@dataclass
class Step:
    """Rows of ``contexts`` tokens whose last ``queries`` attend. Cache slots without a token are NaN."""

    contexts: Sequence[int]
    queries: Sequence[int]
    group: int = 2
    kv_heads: int = 2
    dim: int = 16
    page: int = 16
    q_type: torch.dtype = torch.float32
    kv_type: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    shared: int = 0
    """Number of shared pages that begin all rows and are read once."""
    trees: dict[int, np.ndarray] = field(default_factory=dict)
    """Masks of trees, by row."""
    scale: float = 0.3
    has_sinks: bool = False
    is_latent: bool = False
    """One vector a token is key and value of all heads, which are ``kv_heads`` groups."""
    num_values: int | None = None
    """Numbers at the end of such a vector that are its value; ``None``: all."""

    def __post_init__(self) -> None:
        torch.manual_seed(shift(len(self.contexts) + max(self.contexts)))
        self.starts = np.cumsum(self.queries) - self.queries
        counts = [-(-context // self.page) for context in self.contexts]
        own = [count - self.shared for count in counts]
        order = torch.randperm(self.shared + sum(own) + 2).numpy()
        self.pages = np.zeros((len(counts), max(counts)), np.int64)
        first = self.shared
        for row, count in enumerate(own):
            self.pages[row, : self.shared] = order[: self.shared]
            self.pages[row, self.shared : self.shared + count] = order[first : first + count]
            first += count
        kinds = (1, 1) if self.is_latent else (2, self.kv_heads)
        numbers = torch.full((*kinds, len(order), self.page, self.dim), torch.nan)
        for context, pages in zip(self.contexts, self.pages, strict=True):
            for position in range(context):
                slot = numbers[:, :, pages[position // self.page], position % self.page]
                if slot.isnan().any():
                    slot.copy_(torch.randn(slot.shape))
        scales = None
        if self.kv_type == INT4:
            stored, scales = quantize_vectors(numbers, self.kv_type)
            exact = dequantize_vectors(stored, scales).double()
        elif self.kv_type.itemsize == 1:
            stored, scales = quantize_vectors(numbers, self.kv_type)
            exact = stored.double() * scales[..., None].double()
        else:
            stored = numbers.to(self.kv_type)
            exact = stored.double()
        scales = None if scales is None else scales.to(DEVICE)
        self.cache = PagedKeys.of_layer(stored.to(DEVICE), scales, self.kv_heads, self.num_values)
        self.exact = exact.expand(2, self.kv_heads, -1, -1, -1)
        self.q = torch.randn(sum(self.queries), self.kv_heads * self.group, self.dim).to(self.q_type)
        self.sinks = 2 * torch.randn(self.kv_heads * self.group) if self.has_sinks else None

    def work(self, programs: int = 8) -> AttentionTiles:
        rows, queries, contexts = np.arange(len(self.queries)), np.array(self.queries), np.array(self.contexts)
        tokens = np.arange(queries.sum())
        committed = contexts - queries
        positions = np.repeat(committed, queries) + tokens - np.repeat(self.starts, queries)
        trees, sees = np.full(len(rows), NO_TREE), None
        if self.trees:
            sees = np.zeros((len(tokens), -(-max(map(len, self.trees.values())) // 32)), np.int32)
            for row, mask in self.trees.items():
                own = slice(self.starts[row], self.starts[row] + len(mask))
                trees[row], positions[own] = committed[row], committed[row] + mask.sum(axis=1) - 1
                sees[own] = pack_bits(mask, sees.shape[1])
        self.positions, prefix = positions, self.shared * self.page
        segments = Segments(rows, queries, tokens, 0 * rows + prefix, contexts, trees, self.starts)
        if self.shared:
            segments = concat_segments([segments, shared_prefix_segment(0, tokens, 0, prefix)])
        plan = plan_tiles(
            segments,
            self.pages,
            positions,
            np.zeros_like(positions),
            heads_per_kv=self.group,
            kv_heads=self.kv_heads,
            head_dim=self.dim,
            programs=programs,
            is_float32=self.kv_type == torch.float32,
            window=self.window,
            sees=sees,
        )
        return TileBuffers(TileShape.of(plan, rounded=True), DEVICE).fill(plan)

    def options(self) -> dict[str, Any]:
        sinks = None if self.sinks is None else self.sinks.to(DEVICE)
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap, "sinks": sinks}

    def expected(self) -> Tensor:
        """Return the attention in float64; call ``work`` first."""
        out = torch.empty(self.q.shape, dtype=torch.float64)
        for row, (context, queries) in enumerate(zip(self.contexts, self.queries, strict=True)):
            position = np.arange(context)
            slots = torch.from_numpy(self.pages[row, position // self.page] * self.page + position % self.page)
            k, v = self.exact.flatten(2, 3)[:, :, slots].repeat_interleave(self.group, dim=1)
            own = slice(self.starts[row], self.starts[row] + queries)
            place = np.concatenate((position[: context - queries], self.positions[own]))
            seen = np.arange(context) <= np.arange(context - queries, context)[:, None]
            if row in self.trees:
                seen[:, context - queries :] = self.trees[row]
            if self.window is not None:
                seen &= place > self.positions[own, None] - self.window
            scores = torch.einsum("thd,hkd->htk", self.q[own].double(), k) * self.scale
            if self.softcap is not None:
                scores = torch.tanh(scores / self.softcap) * self.softcap
            scores = scores.masked_fill(~torch.from_numpy(seen), -torch.inf)
            if self.sinks is not None:
                column = self.sinks.double()[:, None, None].expand(-1, queries, 1)
                scores = torch.cat((scores, column), dim=-1)
            weights = scores.softmax(-1)[..., :context]
            out[own] = torch.einsum("htk,hkd->thd", weights, v)
        return out


def random_tree(tokens: int, seed: int) -> np.ndarray:
    """Return the mask of a random tree, ``[tokens, tokens]``: the tokens that each token attends to."""
    rng = np.random.default_rng(shift(seed))
    sees = np.eye(tokens, dtype=np.bool_)
    for token in range(1, tokens):
        sees[token] |= sees[rng.integers(max(0, token - 5), token)]
    return sees
