"""Division of a GPU's memory: what weights and the largest step leave holds keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from engine.device import release_freed_memory
from engine.protocol.types import EngineError

_GIB = 1 << 30


class NotEnoughMemory(EngineError):
    """Memory does not suffice for what the options ask for."""


class MemoryReading(NamedTuple):
    """Bytes of a GPU's memory."""

    free: int
    total: int


def read_memory(device: torch.device) -> MemoryReading:
    """Return the memory of a GPU, in which freed tensors count as free."""
    release_freed_memory(device)
    return MemoryReading(*torch.cuda.mem_get_info(device))


def measure_peak(device: torch.device, compute: Callable[[], None]) -> int:
    """Return how many bytes more than before were allocated at the peak of ``compute``."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    compute()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def divide(allowed: int, used: int, step: int, drafters: Sequence[int]) -> int:
    """Return the bytes of keys and values of each of as many models as there are ``drafters``; negative if none fit.

    ``allowed``: bytes that the engine may use; ``used``: bytes that it uses already, all weights included; ``step``:
    bytes of the largest step of all models, which run one after the other; ``drafters``: bytes of the models' drafters.
    """
    return (allowed - used - step - sum(drafters)) // len(drafters)


class GpuMemory:
    """Memory of a GPU that one engine may use, shared by those of its models whose caches have no fixed size.

    Every such model is added, with its weights loaded, before the first one takes its share.
    """

    def __init__(self, utilization: float) -> None:
        """``utilization``: share of the GPU's memory that the engine may use, with its weights and all else."""
        self._utilization = utilization
        self._at_start: MemoryReading | None = None
        self._largest_step = 0
        self._drafters: dict[str, int] = {}
        """Bytes of the drafters of the models that have not taken their shares, by the model's name."""

    def open(self, device: torch.device) -> int:
        """Return how many bytes the engine may use. Called before any weights are loaded, and then for each model.

        Raises ``NotEnoughMemory`` if other programs have left less.
        """
        if self._at_start is None:
            self._at_start = read_memory(device)
        free, total = self._at_start
        allowed = int(total * self._utilization)
        if free < allowed:
            possible = int(100 * free / total) / 100
            raise NotEnoughMemory(
                f"--gpu-memory-utilization {self._utilization:g} is {in_gib(allowed)} of this GPU's {in_gib(total)}, "
                f"but other programs leave {in_gib(free)}: end them, or give at most {possible:g}"
            )
        return allowed

    def add(self, name: str, *, step: int, drafter: int) -> None:
        """Register a model that will take its share, and the bytes of its largest step and of its drafter."""
        self._largest_step = max(self._largest_step, step)
        self._drafters[name] = drafter

    def measure_share(self, device: torch.device) -> int:
        """Return the bytes of the share that the next model takes; negative if there is none."""
        return self._measure(device)[1]

    def _measure(self, device: torch.device) -> tuple[int, int]:
        """Return the bytes that are used, and those of the next model's share."""
        allowed = self.open(device)
        assert self._at_start is not None
        used = self._at_start.free - read_memory(device).free
        return used, divide(allowed, used, self._largest_step, [*self._drafters.values()])

    def take(
        self, name: str, device: torch.device, bytes_per_token: int, min_tokens: int, *, state_bytes: int = 0
    ) -> int:
        """Return how many tokens of keys and values fit into a model's share, beside ``state_bytes`` of states.

        Raises ``NotEnoughMemory`` if they are fewer than ``min_tokens``, those of the shortest useful sequence.
        """
        allowed = self.open(device)
        assert self._at_start is not None
        used, share = self._measure(device)
        share -= state_bytes
        if share < min_tokens * bytes_per_token:
            states = f"{in_gib(state_bytes)} for states, " if state_bytes else ""
            raise NotEnoughMemory(
                f"model {name!r} needs {in_gib(used)} for weights, {states}{in_gib(self._largest_step)} for a step and "
                f"{in_gib(min_tokens * bytes_per_token)} for one sequence of {min_tokens} tokens, has "
                f"{in_gib(allowed)} ({self._utilization:g} of the GPU's {in_gib(self._at_start.total)}): use a larger "
                "GPU, a checkpoint with fewer bits, --kv-dtype int8, or fewer --step-tokens"
            )
        del self._drafters[name]
        return share // max(1, bytes_per_token)


def in_gib(num_bytes: int) -> str:
    """Return a size for messages."""
    return f"{num_bytes / _GIB:.2f} GiB"
