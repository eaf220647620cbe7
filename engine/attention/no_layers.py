"""Attention of a model that has none, such as Mamba-2, in the step loop of a GPU."""

from __future__ import annotations

from typing import NoReturn

from engine.attention.cuda_triton import MAX_REPEATABLE_QUERIES
from engine.attention.plan import AttentionMetadata
from kernels.common.attention_schedule import TileBuffers


class NoAttention:
    """Tells of a step what ``TritonAttention`` tells of it: whether its shape is expected again."""

    buffers: tuple[TileBuffers, ...] = ()

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Read a step."""
        self.is_repeatable = int(metadata.query_lens.max()) <= MAX_REPEATABLE_QUERIES

    def __call__(self, layer: int, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"layer {layer} has no attention")

    forward_qkv = __call__
