"""Where a model is computed, and the way of small arrays there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.protocol.types import EngineError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
_KV_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
KV_DTYPES = ("auto", *_KV_TYPES)
_FP8_CAPABILITY = 8, 9
"""GPUs below it have no float8."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights, keys and values lie, and in which type."""

    device: torch.device
    dtype: torch.dtype
    on_gpu: bool
    """Whether steps are computed the way of a GPU: Triton kernels, graphs, tokens drawn where the logits are."""

    def put(self, weights: Tensor) -> Tensor:
        """Weights in this place; the same tensor if it is there."""
        return weights.to(self.device, self.dtype)


HOST = Placement(torch.device("cpu"), torch.float32, on_gpu=False)


def find_place(device: str, dtype: str, *, host_only: str | None = None) -> Placement:
    """The place that an operator asks for: one of ``DEVICES``, in one of ``DTYPES``.

    ``host_only``: why this model runs on the CPU alone; ``auto`` then is that. Raises ``EngineError`` where there is no
    such device or it does not compute in that type.
    """
    for value, known, what in ((device, DEVICES, "device"), (dtype, DTYPES, "dtype")):
        if value not in known:
            raise EngineError(f"{what} {value!r} is none of {', '.join(known)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise EngineError("device 'cuda' was asked for, but torch sees no CUDA device here")
    if device == "cuda" and host_only:
        raise EngineError(f"device 'cuda' was asked for, but {host_only}")
    if device == "cuda" or (device == "auto" and not host_only and torch.cuda.is_available()):
        return Placement(torch.device("cuda"), torch.float32 if dtype == "float32" else torch.bfloat16, on_gpu=True)
    if dtype == "bfloat16":
        raise EngineError("dtype 'bfloat16' was asked for, but the CPU computes in float32 alone")
    return HOST


def kv_type(name: str, place: Placement) -> torch.dtype:
    """The type of keys and values that an operator asks for by one of ``KV_DTYPES``; ``auto`` is that of the weights.

    Raises ``EngineError`` where there is no such type or the GPU has none.
    """
    if name not in KV_DTYPES:
        raise EngineError(f"kv_dtype {name!r} is none of {', '.join(KV_DTYPES)}")
    if name == "fp8" and place.device.type == "cuda":
        capability = torch.cuda.get_device_capability(place.device)
        if capability < _FP8_CAPABILITY:
            has, needs = (".".join(map(str, version)) for version in (capability, _FP8_CAPABILITY))
            raise EngineError(f"kv_dtype 'fp8' needs a GPU of compute capability {needs}; this one has {has}")
    return _KV_TYPES.get(name, place.dtype)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting for it. The pinned copy that it is sent from goes back to its
    allocator at once, which gives it to nobody else before it was read."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
