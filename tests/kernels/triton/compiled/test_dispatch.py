"""The public functions launch their kernels for GPU tensors, with results of the shapes and types of a CPU.

Nothing is compiled: the tensors only claim to be on a GPU, and launches are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from kernels.attention.kv_write import rotary_write
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors
from kernels.layers.activation import clamped_silu_mul, gelu_tanh_mul, silu_gate, silu_mul
from kernels.layers.gate import sigmoid_mul
from kernels.layers.norm import add_rms_norm, rms_norm
from kernels.linear.fp8 import fp8_linear
from kernels.linear.nf4 import Nf4, grouped_nf4_linear, nf4_linear
from kernels.linear.weight_only_int4 import Int4, int4_linear
from kernels.linear.weight_only_int8 import int8_linear, int8_weight_linear
from kernels.quantize import quantize_vectors
from kernels.recurrent.convolution import causal_convolution
from kernels.recurrent.gated_delta import delta_gates, gated_delta
from kernels.recurrent.mamba2 import HeadConstants, mamba2_scan
from kernels.sampling.sampling import PenaltyTensors, apply_penalties, sample

F32, F64, I16, I32, I64 = torch.float32, torch.float64, torch.int16, torch.int32, torch.int64
U8, FP8 = torch.uint8, torch.float8_e4m3fn
ROWS, IN, OUT = 5, 256, 128


class OnGpu(Tensor):
    """A tensor without memory that claims to be on a GPU, as do tensors computed from it."""

    is_cuda = True


def like_gpu(shape: tuple[int, ...], dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").as_subclass(OnGpu)


def zeros(shape: tuple[int, ...], dtype: torch.dtype = F32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def run(self: Any, *args: Any, **options: Any) -> None:
        names.append(self.fn.__name__)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return names


Make = Callable[..., Tensor]


def int4(make: Make) -> Tensor:
    weight = Int4(make((IN // 128, OUT, 32), I16), make((2, OUT)), make((2, OUT), U8), None, IN // 2)
    return int4_linear(make((ROWS, IN)), weight, make((OUT,)))


def write(make: Make, stored: torch.dtype | None) -> Tensor:
    cache = make((2, 2, 3, 4, 16), stored) if stored else make((2, 2, 3, 4, 16))
    scales = make((2, 2, 3, 4), F32) if stored else None
    angles = make((ROWS, 16), F32)
    return rotary_write(make((ROWS, 6, 16)), make((ROWS, 2, 16)), angles, angles, make((ROWS,), I64), cache, scales)


def drawn(make: Make) -> tuple[Tensor, ...]:
    laws = SamplingTensors(*(make((ROWS,), F64) for _ in range(3)), make((ROWS,), I64))
    return sample(make((ROWS, 50), F32), laws, NoiseKeys(*(make((ROWS,), I64) for _ in range(3))))


def changed(make: Make) -> Tensor:
    logits = make((ROWS, 50), F32)
    columns = [make((0,), dtype) for dtype in (I64, F32, torch.bool, F32)]
    apply_penalties(logits, PenaltyTensors(make((ROWS + 1,), I64), *columns, make((ROWS, 3), F32)))
    return logits


def segments(make: Make) -> Tensor:
    return make((ROWS, 5), I64)


def delta(make: Make) -> Tensor:
    q, k, gates = make((ROWS, 1, 8)), make((ROWS, 1, 8)), make((ROWS, 2), F32)
    return gated_delta(q, k, make((ROWS, 2, 8)), gates, gates, make((3, 2, 8, 8), F32), segments(make))


def scan(make: Make) -> Tensor:
    b, dt, heads = make((ROWS, 1, 8)), make((ROWS, 2)), HeadConstants(*(make((2,), F32) for _ in range(3)), 0.0, 1.0)
    return mamba2_scan(make((ROWS, 2, 8)), b, b, dt, heads, make((3, 2, 8, 8), F32), segments(make))


def convolve(make: Make) -> Tensor:
    states = make((3, 3, IN), F32)
    return causal_convolution(make((ROWS, IN)), make((4, IN), F32), states, segments(make), activate=True)


CASES: dict[str, tuple[Callable[[Make], Tensor | tuple[Tensor, ...]], list[str]]] = {
    "rms_norm": (lambda make: rms_norm(make((ROWS, IN)), make((IN,)), 1e-5), ["_rms_norm"]),
    "add_rms_norm": (lambda make: add_rms_norm(make((ROWS, IN)), make((ROWS, IN)), make((IN,)), 1e-5), ["_rms_norm"]),
    "silu_mul": (lambda make: silu_mul(make((ROWS, IN))), ["_gated"]),
    "gelu_tanh_mul": (lambda make: gelu_tanh_mul(make((ROWS, IN))), ["_gated"]),
    "clamped_silu_mul": (lambda make: clamped_silu_mul(make((ROWS, IN)), alpha=1.7, limit=7.0), ["_gated"]),
    "silu_gate": (lambda make: silu_gate(make((ROWS, IN)), make((ROWS, IN))), ["_scale_rows"]),
    "sigmoid_mul": (lambda make: sigmoid_mul(make((ROWS, 1)), make((ROWS, IN))), ["_scale_rows"]),
    "causal_convolution": (convolve, ["_convolve"]),
    "delta_gates": (lambda make: delta_gates(*[make((ROWS, 2))] * 2, *[make((2,), F32)] * 2), ["_delta_gates"]),
    "gated_delta": (delta, ["_gated_delta"]),
    "mamba2_scan": (scan, ["_scan"]),
    "rotary_write": (lambda make: write(make, None), ["_rotary_write"]),
    "rotary_write int8": (lambda make: write(make, torch.int8), ["_rotary_write"]),
    "rotary_write float8": (lambda make: write(make, FP8), ["_rotary_write"]),
    "quantize_vectors": (lambda make: quantize_vectors(make((ROWS, 2, 8)), torch.int8), ["_quantize"]),
    "sample": (drawn, ["_sample"]),
    "apply_penalties": (changed, ["_apply_penalties"]),
    "int4_linear": (int4, ["_sliced"]),
    "int8_weight_linear": (
        lambda make: int8_weight_linear(make((ROWS, IN)), make((OUT, IN), torch.int8), make((1, OUT))),
        ["_weight_only"],
    ),
    "nf4_linear": (
        lambda make: nf4_linear(make((ROWS, IN)), Nf4(make((OUT, IN // 2), U8), make((4, OUT), F32))),
        ["_weight_only"],
    ),
    "grouped_nf4_linear": (
        lambda make: grouped_nf4_linear(
            make((ROWS, IN)), Nf4(make((2, OUT, IN // 2), U8), make((2, 4, OUT), F32)), None, make((2,), I32)
        ),
        ["_grouped"],
    ),
    "int8_linear": (
        lambda make: int8_linear(make((ROWS, IN)), make((OUT, IN), torch.int8), make((OUT,), F32)),
        ["_quantize", "_scaled"],
    ),
    "fp8_linear": (
        lambda make: fp8_linear(make((ROWS, IN)), make((OUT, IN), FP8), make((), F32), make((OUT,))),
        ["_quantize", "_scaled"],
    ),
    "fp8_linear blocks": (
        lambda make: fp8_linear(make((ROWS, IN)), make((OUT, IN), FP8), make((1, 2), F32)),
        ["_quantize", "_scaled"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gpu_tensors_launch_kernels_with_the_same_kind_of_result(name: str, launched: list[str]) -> None:
    call, kernels = CASES[name]
    expected = call(zeros)
    assert launched == []
    result = call(like_gpu)
    # With split-K another kernel adds the parts.
    assert [kernel for kernel in launched if kernel != "_sum_parts"] == kernels
    for ours, plain in zip(*(x if isinstance(x, tuple) else (x,) for x in (result, expected)), strict=True):
        assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype)
