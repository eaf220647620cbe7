"""Times of steps whose attention Triton's kernels and FlashInfer's computed, by the name of the GPU.

``flashinfer_times.json`` has an entry for each GPU on which both were measured. ``python -m
benchmarks.gpu.flashinfer_times`` measures the GPU at hand and writes its entry. A GPU without one never uses
FlashInfer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from engine.attention.plan import AttentionMetadata

FILE = Path(__file__).with_name("flashinfer_times.json")

_MARGIN = 0.95
"""Largest share of Triton's time at which FlashInfer counts as faster: less is within the noise of the times."""
_MAX_DISTANCE = 2.0
"""Largest distance to a measured step in each number, in powers of two."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One measured step: all of a layer's attention, its share of the plan included."""

    rows: int
    tokens: int
    """New tokens of all rows."""
    keys: int
    """Keys of all rows."""
    triton_us: float
    flashinfer_us: float

    @property
    def kind(self) -> str:
        """``decode`` if every row has one new token, else ``prefill``."""
        return _kind(self.rows, self.tokens)

    def distance(self, rows: int, tokens: int, keys: int) -> float:
        """Return the distance to a step in the number that differs most, in powers of two."""
        pairs = (self.rows, rows), (self.tokens, tokens), (self.keys, keys)
        return max(abs(math.log2(ours / theirs)) for ours, theirs in pairs)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The measured steps of one GPU."""

    steps: Sequence[StepTime]
    source: str
    """Versions of what was measured."""

    def is_flashinfer_faster(self, metadata: AttentionMetadata) -> bool:
        """Return True if FlashInfer was faster for the measured step that is nearest, of the same kind.

        A step that is far from all of them stays with Triton's kernels.
        """
        shape = len(metadata.query_lens), int(metadata.query_lens.sum()), int(metadata.seq_lens.sum())
        same_kind = [step for step in self.steps if step.kind == _kind(*shape[:2])]
        nearest = min(same_kind, key=lambda step: step.distance(*shape), default=None)
        if nearest is None or nearest.distance(*shape) > _MAX_DISTANCE:
            return False
        return nearest.flashinfer_us < _MARGIN * nearest.triton_us


def read_times(path: Path = FILE) -> dict[str, StepTimes]:
    """Return the measured steps by the name of the GPU."""
    entries = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: StepTimes(tuple(StepTime(**step) for step in entry["steps"]), entry["source"])
        for name, entry in entries.items()
    }


@cache
def step_times(device: torch.device) -> StepTimes | None:
    """Return the measured steps of a device's model of GPU; ``None`` if there are none."""
    if device.type != "cuda":
        return None
    return read_times().get(torch.cuda.get_device_properties(device).name)


def _kind(rows: int, tokens: int) -> str:
    return "decode" if rows == tokens else "prefill"
