"""Paged attention compiled for Hopper: no spills, products on the matrix units, wide asynchronous loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernels.common.attention_schedule import FIELDS, AttentionTiles, tile_height
from kernels.common.int4 import INT4
from kernels.common.paged_keys import PagedKeys
from kernels.triton.paged_attention import launch
from tests.kernels.triton.hopper import SHARED_MEMORY, compiling
from tests.long import mostly_long

HEADS, KV_HEADS, PAGE = 32, 8, 16
FLOAT8 = torch.float8_e4m3fn
LATENTS: dict[str, Any] = {"dim": 576, "heads": 16, "kv_heads": 1, "is_latent": True}
"""Options of the latents of DeepSeek-V2-Lite."""


@dataclass
class Kind:
    """A specialisation of the kernel, and the limits of its resources."""

    registers: int
    product: str
    kv_type: torch.dtype = torch.bfloat16
    dim: int = 128
    queries: int = 1
    trees: bool = False
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    is_latent: bool = False
    """One vector a token is key and value of all heads, which are ``kv_heads`` groups."""
    occupancy: float = 0.125
    capability: int = 90


KINDS = {
    "decode": Kind(168, "HMMA", occupancy=0.18),
    "decode, head dim 64": Kind(96, "HMMA", torch.float16, dim=64, occupancy=0.31),
    "decode, sinks, head dim 64": Kind(96, "HMMA", dim=64, window=128, has_sinks=True, occupancy=0.31),
    "a prompt, sinks, head dim 64": Kind(216, "HGMMA", dim=64, queries=64, window=128, has_sinks=True),
    "decode, float8": Kind(200, "HMMA", FLOAT8),
    "decode, int8": Kind(200, "HMMA", torch.int8, window=4096),
    "some queries": Kind(224, "HGMMA", queries=12),
    "a prompt": Kind(216, "HGMMA", queries=64, softcap=30.0),
    "a prompt, int8, head dim 256": Kind(255, "HGMMA", torch.int8, dim=256, queries=64),
    "a tree": Kind(248, "HGMMA", queries=12, trees=True),
    "a tree, int8": Kind(248, "HGMMA", torch.int8, queries=12, trees=True, window=4096),
    "decode, int4": Kind(136, "HMMA", INT4, occupancy=0.18),
    "decode, int4, head dim 64": Kind(112, "HMMA", INT4, dim=64, occupancy=0.25),
    "a prompt, int4": Kind(255, "HGMMA", INT4, queries=64),
    "a tree, int4": Kind(255, "HGMMA", INT4, queries=12, trees=True, window=4096),
    "decode, float32": Kind(136, "FFMA", torch.float32, occupancy=0.0625),
    "decode, float32, head dim 256": Kind(255, "FFMA", torch.float32, dim=256, occupancy=0.0625),
    "a prompt, float32": Kind(88, "FFMA", torch.float32, queries=64, occupancy=0.25),
    "a prompt, float32, head dim 64": Kind(112, "FFMA", torch.float32, dim=64, queries=64, occupancy=0.25),
    "a prompt, float32, head dim 256": Kind(128, "FFMA", torch.float32, dim=256, queries=64, softcap=30.0),
    "a tree, float32": Kind(96, "FFMA", torch.float32, queries=12, trees=True, window=4096, occupancy=0.25),
    "decode, head dim 512": Kind(255, "HMMA", dim=512),
    "a prompt, head dim 512": Kind(255, "HGMMA", dim=512, queries=64),
    "decode, int8, head dim 512": Kind(255, "HMMA", torch.int8, dim=512),
    "decode, int4, head dim 512": Kind(255, "HMMA", INT4, dim=512),
    "decode, float32, head dim 512": Kind(255, "FFMA", torch.float32, dim=512),
    "a prompt, float32, head dim 512": Kind(255, "FFMA", torch.float32, dim=512, queries=64),
    "decode, latents": Kind(255, "HGMMA", **LATENTS),
    "decode, latents of 128 heads": Kind(255, "HGMMA", **LATENTS | {"heads": 128, "kv_heads": 2}),
    "a prompt, latents": Kind(255, "HGMMA", queries=64, **LATENTS),
    "a tree, latents": Kind(255, "HGMMA", queries=12, trees=True, **LATENTS),
    "decode, int8 latents": Kind(255, "HMMA", torch.int8, **LATENTS),
    "decode, int8 latents of 128 heads": Kind(255, "HMMA", torch.int8, **LATENTS | {"heads": 128, "kv_heads": 4}),
    "decode, int4 latents of 128 heads": Kind(255, "HMMA", INT4, **LATENTS | {"heads": 128, "kv_heads": 8}),
    "decode, float8 latents": Kind(255, "HMMA", FLOAT8, **LATENTS),
    "decode, int4 latents": Kind(255, "HMMA", INT4, **LATENTS),
    "a prompt, int8 latents": Kind(255, "HMMA", torch.int8, queries=64, **LATENTS),
    "a prompt, int4 latents": Kind(255, "HMMA", INT4, queries=64, **LATENTS),
    "decode, float32 latents": Kind(255, "FFMA", torch.float32, **LATENTS),
    "a prompt, float32 latents": Kind(255, "FFMA", torch.float32, queries=64, **LATENTS),
    "decode, int4, Blackwell": Kind(144, "HMMA", INT4, capability=100, occupancy=0.18),
}


def launch_kind(kind: Kind) -> None:
    """Launch a specialisation on tensors without memory."""
    numbers: dict[str, Any] = {"dtype": torch.int32, "device": "meta"}
    low, per_kv, narrow = kind.queries == 1, kind.heads // kind.kv_heads, kind.kv_type.itemsize == 1
    work = AttentionTiles(
        pages=torch.empty(64, 256, **numbers),
        positions=torch.empty(64, **numbers),
        slots=torch.empty(64, dtype=torch.int64, device="meta"),
        tokens=torch.empty(64, **numbers),
        low=torch.empty(64 if low else 0, FIELDS, **numbers),
        high=torch.empty(0 if low else 64, FIELDS, **numbers),
        height=tile_height(
            kind.queries * per_kv,
            per_kv,
            kind.dim,
            is_float32=kind.kv_type == torch.float32 or (narrow and kind.is_latent),
        ),
        merged=torch.empty(64 if low else 0, 3, **numbers),
        partials=torch.empty(64, **numbers),
        sees=torch.empty(64, 1, **numbers) if kind.trees else None,
    )
    q = torch.empty(64, kind.heads, kind.dim, dtype=torch.bfloat16 if narrow else kind.kv_type, device="meta")
    slots = 1 if kind.is_latent else 2, 1 if kind.is_latent else kind.kv_heads, 1024, PAGE
    kv = torch.empty(*slots, kind.dim, dtype=kind.kv_type, device="meta")
    scales = torch.empty(slots, device="meta")
    if kind.kv_type == INT4:
        kv = torch.empty(*slots, kind.dim // 2, dtype=INT4, device="meta")
        scales = torch.empty(*slots, kind.dim // 32, dtype=torch.float16, device="meta")
    num_values = 512 if kind.is_latent else None
    cache = PagedKeys.of_layer(kv, scales if narrow else None, kind.kv_heads, num_values)
    sinks = torch.empty(kind.heads, device="meta") if kind.has_sinks else None
    launch(q, cache, work, scale=0.1, window=kind.window, softcap=kind.softcap, sinks=sinks)


@pytest.mark.parametrize("name", mostly_long(KINDS, every=6))
def test_attention_fits_a_hopper_gpu(name: str) -> None:
    kind = KINDS[name]
    narrow = kind.kv_type.itemsize == 1
    with compiling(kind.capability) as made:
        launch_kind(kind)
    rotations = [kernel for kernel in made if kernel.kernel == "_rotate"]
    assert len(rotations) == (2 if kind.kv_type == INT4 else 0)
    attend, *merge = (kernel for kernel in made if kernel.kernel != "_rotate")
    for kernel in made:
        assert kernel.spills == kernel.stack == 0, kernel
        assert kernel.shared <= SHARED_MEMORY, kernel
    assert attend.registers <= kind.registers, attend
    assert attend.occupancy >= kind.occupancy, attend
    assert attend.count(kind.product) > 0, attend
    # Latents of 8 bits are loaded by eight: a thread converts no more.
    assert attend.count("LDGSTS", "" if narrow and kind.is_latent else ".128") > 0, attend
    for kernel in rotations:
        assert kernel.registers <= 88, kernel
    for kernel in merge:
        assert kernel.registers <= (64 if kind.dim <= 128 else 80), kernel
        assert kernel.count("LDG", ".128") > 0, kernel
