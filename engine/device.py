"""Device and dtype of a model, and asynchronous copies of small arrays to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from engine.gpu_requirements import refuse_old_driver
from engine.protocol.options import Device, DType, KVDType
from engine.protocol.types import EngineError
from kernels.common.int4 import INT4

_KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": INT4}
KV_DTYPES: tuple[str, ...] = get_args(KVDType)
_FP8_CAPABILITY = 8, 9
"""The first compute capability with float8."""


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Device and dtype of a model's weights and KV cache."""

    device: torch.device
    dtype: torch.dtype
    uses_gpu_kernels: bool
    """Run steps with Triton kernels and CUDA graphs, and sample on the device. Tests set it on a CPU, too."""

    def convert(self, weights: Tensor) -> Tensor:
        """Return ``weights`` on the device in its dtype; the same tensor if it is there already."""
        return weights.to(self.device, self.dtype)


CPU = DeviceConfig(torch.device("cpu"), torch.float32, uses_gpu_kernels=False)


def select_device(device: str, dtype: str, *, cpu_only_reason: str | None = None) -> DeviceConfig:
    """Return the configuration for a ``Device`` and a ``DType`` (``engine.protocol.options``).

    ``cpu_only_reason``: why this model runs on the CPU alone, which ``auto`` then selects. Raises ``EngineError`` if
    the device does not exist or does not compute in that dtype.
    """
    for value, choices, option in ((device, get_args(Device), "device"), (dtype, get_args(DType), "dtype")):
        if value not in choices:
            raise EngineError(f"{option} {value!r} is not supported; choose one of {', '.join(choices)}")
    if device == "cuda" and cpu_only_reason:
        raise EngineError(f"device 'cuda' was requested, but {cpu_only_reason}")
    if device == "cuda" or (device == "auto" and not cpu_only_reason):
        refuse_old_driver()
    if device == "cuda" and not torch.cuda.is_available():
        raise EngineError("device 'cuda' was requested, but torch finds no CUDA device")
    if device == "cuda" or (device == "auto" and not cpu_only_reason and torch.cuda.is_available()):
        gpu_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        return DeviceConfig(torch.device("cuda"), gpu_dtype, uses_gpu_kernels=True)
    if dtype == "bfloat16":
        raise EngineError("dtype 'bfloat16' was requested, but the CPU computes in float32 only")
    return CPU


def select_kv_dtype(name: str, device_config: DeviceConfig) -> torch.dtype:
    """Return the dtype of the KV cache for one of ``KV_DTYPES``; ``auto`` is the dtype of the weights.

    Raises ``EngineError`` if there is no such dtype or the GPU does not support it.
    """
    if name not in KV_DTYPES:
        raise EngineError(f"kv_dtype {name!r} is not supported; choose one of {', '.join(KV_DTYPES)}")
    if name == "fp8" and device_config.device.type == "cuda":
        capability = torch.cuda.get_device_capability(device_config.device)
        if capability < _FP8_CAPABILITY:
            has, needs = (".".join(map(str, version)) for version in (capability, _FP8_CAPABILITY))
            raise EngineError(f"kv_dtype 'fp8' needs a GPU of compute capability {needs}; this one has {has}")
    return _KV_DTYPES.get(name, device_config.dtype)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting for the copy.

    The pinned source returns to its allocator at once, which does not reuse it before the copy has read it.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def copy_to_place(values: Tensor, target: Tensor) -> Tensor:
    """Copy a CPU tensor to ``target`` without waiting for the copy, as ``to_device`` does; return ``target``."""
    return target.copy_(values.pin_memory() if target.device.type == "cuda" else values, non_blocking=True)


def release_freed_memory(device: torch.device) -> None:
    """Return the memory of freed tensors to a GPU, which torch otherwise keeps in pieces of their sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
