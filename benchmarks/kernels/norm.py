"""The operators between products, which read and write each number once and do little else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.measure import Case, Run, Runs, compiled
from kernels.attention.kv_write import rotary_write
from kernels.common.rotary import frequencies, rotary, rotary_tables
from kernels.layers.activation import silu_mul
from kernels.layers.norm import add_rms_norm
from kernels.quantize import LIMITS

_EPS = 1e-5
_HEADS, _KV_HEADS, _DIM, _PAGE = 32, 8, 128, 16


def cases(rows: tuple[int, ...] = (16, 256, 4096), width: int = 4096) -> Iterator[Case]:
    """Yield RMSNorm of a sum, SwiGLU, and the write of keys and values, for some numbers of tokens."""
    inner = 7 * width // 2
    for count in rows:
        name = f"sum and RMSNorm, {count} × {width}"
        yield Case(name, 4 * 2 * count * width, partial(_norm, rows=count, width=width))
    for count in rows:
        yield Case(f"SwiGLU, {count} × {inner}", 3 * 2 * count * inner, partial(_silu, rows=count, inner=inner))
    for stored in (torch.bfloat16, *LIMITS):
        for count in rows:
            heads = _HEADS + 2 * _KV_HEADS
            written = 2 * _HEADS + 2 * _KV_HEADS * (stored.itemsize + (4 / _DIM if stored in LIMITS else 0))
            moved = int(count * _DIM * (2 * heads + written + 8))
            name = f"rotary and write to {str(stored).removeprefix('torch.')} pages, {count} tokens"
            yield Case(name, moved, partial(_write, rows=count, stored=stored))


def _norm(device: torch.device, rows: int, width: int) -> Runs:
    x, residual = (torch.randn(rows, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(width, device=device, dtype=torch.bfloat16)
    fast = compiled(_torch_norm, device)
    return Runs(
        lambda: add_rms_norm(x, residual, weight, _EPS)[0],
        {"torch": lambda: _torch_norm(x, residual, weight)[0], "torch.compile": lambda: fast(x, residual, weight)[0]},
        lambda: F.rms_norm((x + residual).float(), (width,), weight.float(), _EPS),
        0.01,
    )


def _torch_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, _EPS), total


def _silu(device: torch.device, rows: int, inner: int) -> Runs:
    x = torch.randn(rows, 2 * inner, device=device, dtype=torch.bfloat16)
    fast = compiled(_torch_silu, device)
    peers = {"torch": lambda: _torch_silu(x), "torch.compile": lambda: fast(x)}
    return Runs(lambda: silu_mul(x), peers, lambda: _torch_silu(x.float()), 0.01)


def _torch_silu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _write(device: torch.device, rows: int, stored: torch.dtype) -> Runs:
    qkv = torch.randn(rows, _HEADS + 2 * _KV_HEADS, _DIM, device=device, dtype=torch.bfloat16)
    qk, v = qkv[:, : _HEADS + _KV_HEADS], qkv[:, _HEADS + _KV_HEADS :]
    cos, sin = (table.to(device) for table in rotary_tables(frequencies(_DIM, 5e5), rows))
    pages = -(-rows // _PAGE)
    slots = torch.randperm(pages * _PAGE, device=device)[:rows]
    cache = torch.zeros(2, _KV_HEADS, pages, _PAGE, _DIM, device=device).to(stored)
    scales = torch.zeros(cache.shape[:-1], device=device) if stored in LIMITS else None

    given, fast = (qk, v, cos, sin, slots, cache), compiled(_torch_write, device)
    peers: dict[str, Run] = {"torch": lambda: _torch_write(*given), "torch.compile": lambda: fast(*given)}
    return Runs(
        lambda: rotary_write(*given, scales),
        {} if scales is not None else peers,
        lambda: rotary(qk.float(), cos, sin)[:, :_HEADS],
        0.01,
    )


def _torch_write(qk: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
    rotated = rotary(qk, cos, sin).to(qk.dtype)
    new = torch.stack((rotated[:, _HEADS:], v)).transpose(1, 2)
    cache.flatten(2, 3).index_copy_(2, slots, new)
    return rotated[:, :_HEADS]
