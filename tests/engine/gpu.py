"""Run the engine's GPU code on the CPU: attention, padding, graphs and sampling, with each kernel's reference or, if a
test asks for it, the kernel in Triton's interpreter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.cuda_triton import TritonAttention
from engine.attention.grouped import GpuAttention, GroupedTritonAttention
from engine.attention.plan import AttentionMetadata
from engine.core.gpu_memory import MemoryReading
from engine.device import DeviceConfig
from engine.models.interface import Batch, Model
from engine.runner.forward_gpu import GpuForward
from engine.runner.graph_pool import Replay

EMULATED_GPU = DeviceConfig(torch.device("cpu"), torch.float32, uses_gpu_kernels=True)
EMULATED_BYTES = 20 << 20
"""Memory of the emulated GPU, in which weights take none."""
EMULATED_STEP_BYTES = 8 << 20
"""Memory that a step of any model takes."""


class EmulatedForward(GpuForward):
    """A forward pass that remembers the states of its model, which a capture must not change."""

    states: Sequence[Tensor] = ()

    def __call__(
        self,
        batch: Batch,
        rows: AttentionMetadata,
        read: Sequence[int] | None = None,
        layers: frozenset[int] = frozenset(),
    ) -> Tensor:
        if batch.states is not None:
            self.states = [tensor for layer in batch.states.layers for tensor in layer]
        return super().__call__(batch, rows, read, layers)


class EmulatedGraph:
    """A CUDA graph without a GPU. Like a captured one it reads the memory of its capture, and no variable that changed
    since.
    """

    captured = 0
    replayed = 0

    def __init__(self, compute: Callable[[], Tensor], attend: GpuAttention, states: Sequence[Tensor] = ()) -> None:
        EmulatedGraph.captured += 1
        self._compute, self._backends = compute, list[TritonAttention]()
        if isinstance(attend, TritonAttention):
            self._backends = [attend]
        elif isinstance(attend, GroupedTritonAttention):
            self._backends = [group.attend for group in attend.groups]
        self._memory = [(backend._work, backend._slots) for backend in self._backends]
        before = [tensor.clone() for tensor in states]
        self.output = _unknown(compute())  # a capture computes nothing
        for tensor, values in zip(states, before, strict=True):
            tensor.copy_(values)

    def replay(self) -> None:
        EmulatedGraph.replayed += 1
        now = [(backend._work, backend._slots) for backend in self._backends]
        self._set_memory(self._memory)
        self.output.copy_(self._compute())
        self._set_memory(now)

    def _set_memory(self, memory: Sequence[tuple[Any, Any]]) -> None:
        for backend, (work, slots) in zip(self._backends, memory, strict=True):
            backend._work, backend._slots = work, slots


def _unknown(like: Tensor) -> Tensor:
    return torch.full_like(like, torch.nan if like.is_floating_point() else -1)


def emulated_forward(model: Model, attend: GpuAttention, device: torch.device) -> GpuForward:
    """Create a forward pass whose graphs are emulated."""

    def capture(compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        graph = EmulatedGraph(compute, attend, list_states())
        return graph.replay, graph.output

    def list_states() -> Sequence[Tensor]:
        made = reference()  # a test may keep the sampler alone
        return () if made is None else made.states

    forward = EmulatedForward(model, attend, device, capture)
    reference = weakref.ref(forward)  # which holds the function
    return forward


class EmulatedPool:
    """Graphs of computations whose state is all in tensors, which ``EmulatedGraph`` would compute at the capture."""

    captured = 0

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        EmulatedPool.captured += 1

        def replay() -> None:
            EmulatedGraph.replayed += 1
            compute()

        return replay, torch.empty(0)


def emulate_gpu(monkeypatch: pytest.MonkeyPatch, device_config: DeviceConfig = EMULATED_GPU) -> None:
    """Make engines that are created from now on run their GPU code, without the steps that warm it up."""
    monkeypatch.setattr(EmulatedGraph, "captured", 0)
    monkeypatch.setattr(EmulatedGraph, "replayed", 0)
    monkeypatch.setattr(EmulatedPool, "captured", 0)
    monkeypatch.setattr("engine.runner.forward.GpuForward", emulated_forward)
    monkeypatch.setattr("engine.speculation.drafters.device_levels.GraphPool", EmulatedPool)
    monkeypatch.setattr("engine.core.model_setup.select_device", lambda *_, **__: device_config)
    monkeypatch.setattr("engine.core.step.warm_up", lambda *_, **__: None)
    monkeypatch.setattr("engine.core.gpu_memory.read_memory", lambda _: MemoryReading(EMULATED_BYTES, EMULATED_BYTES))
    monkeypatch.setattr("engine.core.model_setup.measure_peak", lambda _, compute: compute() or EMULATED_STEP_BYTES)
