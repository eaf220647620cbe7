"""An engine that goes the way of a GPU on the CPU: its attention, padding, graphs and drawing, with each kernel's plain
reference (or, where a test asks for it, the kernel itself in Triton's interpreter)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.attention.cuda_triton import TritonAttention
from engine.device import DeviceConfig
from engine.models.interface import Model
from engine.runner.forward_gpu import GpuForward

EMULATED_GPU = DeviceConfig(torch.device("cpu"), torch.float32, uses_gpu_kernels=True)


class Replay:
    """A graph without a GPU. It sees what a captured one would see: the memory that was there when it was captured, and
    no variable that changed since."""

    captured = 0
    replayed = 0

    def __init__(self, compute: Callable[[], Tensor], attend: TritonAttention) -> None:
        Replay.captured += 1
        self._compute, self._attend = compute, attend
        self._memory = attend._work, attend._slots
        self.output = torch.full_like(compute(), torch.nan)  # a capture computes nothing

    def replay(self) -> None:
        Replay.replayed += 1
        attend = self._attend
        now = attend._work, attend._slots
        attend._work, attend._slots = self._memory
        self.output.copy_(self._compute())
        attend._work, attend._slots = now


def pretend(monkeypatch: pytest.MonkeyPatch, device_config: DeviceConfig = EMULATED_GPU) -> None:
    """Engines that are made from now on go the way of a GPU."""

    def forward(model: Model, attend: TritonAttention, device: torch.device) -> GpuForward:
        return GpuForward(model, attend, device, lambda compute: Replay(compute, attend))

    monkeypatch.setattr(Replay, "captured", 0)
    monkeypatch.setattr(Replay, "replayed", 0)
    monkeypatch.setattr("engine.runner.forward.GpuForward", forward)
    monkeypatch.setattr("engine.core.model_setup.select_device", lambda *_, **__: device_config)
