"""Device and dtype of a model, its stream of work, and asynchronous copies of small arrays to and from the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, get_args

import torch
from torch import Tensor

from engine.gpu_requirements import FLOAT8_CAPABILITY, GpuFormat, check_format, refuse_old_driver
from engine.protocol.options import Device, DType, KVDType
from engine.protocol.types import EngineError
from kernels.common.int4 import INT4

_KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": INT4}
KV_DTYPES: tuple[str, ...] = get_args(KVDType)
_FLOAT8_KEYS = GpuFormat("kv_dtype 'fp8'", FLOAT8_CAPABILITY, "use --kv-dtype int8, which takes as many bytes")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Device and dtype of a model's weights and KV cache."""

    device: torch.device
    dtype: torch.dtype
    uses_gpu_kernels: bool
    """Run steps with Triton kernels and CUDA graphs, and sample on the device. Tests set it on a CPU, too."""
    is_batch_invariant: bool = False
    """Compute for each token what depends, bit for bit, on its sequence alone."""

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
    if name == "fp8":
        check_format(_FLOAT8_KEYS, device_config.device)
    return _KV_DTYPES.get(name, device_config.dtype)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting for the copy.

    The pinned source returns to its allocator at once, which does not reuse it before the copy has read it.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """Copy a tensor to the host without waiting for the copy, which is complete once the stream has come that far."""
    # Torch allocates pinned memory for such a copy.
    return values.to("cpu", non_blocking=True, copy=True)


class DeviceEvent(Protocol):
    """A point in a device's stream of work."""

    def query(self) -> bool:
        """Return True if the device has come that far."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has come that far."""
        ...


class _ReachedEvent:
    """An event on a device whose work is done when a call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_REACHED = _ReachedEvent()


def record_event(device: torch.device) -> DeviceEvent:
    """Return the point after all work that was launched on the current stream."""
    if device.type != "cuda":
        return _REACHED
    event: DeviceEvent = torch.cuda.current_stream(device).record_event()
    return event


def create_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream for one model, after what was launched before; ``None`` if the device has no streams."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def use_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Launch on a stream within a context. Memory that is allocated there is reused on this stream alone."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def copy_to_place(values: Tensor, target: Tensor) -> Tensor:
    """Copy a CPU tensor to ``target`` without waiting for the copy, as ``to_device`` does; return ``target``."""
    return target.copy_(values.pin_memory() if target.device.type == "cuda" else values, non_blocking=True)


def release_freed_memory(device: torch.device) -> None:
    """Return the memory of freed tensors to a GPU, which torch otherwise keeps in pieces of their sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
