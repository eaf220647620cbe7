"""Lower bounds of a decode step: its matrix products run alone, and this machine's memory bandwidth and arithmetic."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import reasoner
from benchmarks.engine.process import resident_bytes
from engine.models.load import load_model
from kernels.linear.fp32 import Linear

BUNDLED = Path(reasoner.__file__).parent / "bundled" / "policy"
"""A small model, whose load imports what any does."""


def products(folder: Path, rows: int) -> dict[str, float]:
    """Return the median seconds of a step of ``rows`` tokens for its products with the weights alone, their FLOPs and
    their bytes. They use the decoder's operator, and every layer has its own weights, so that they come from memory as
    in a step.
    """
    config = json.loads((folder / "config.json").read_text())
    hidden, intermediate, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    # As the decoder fuses them: query-key-value, attention output, gate-up, down.
    shapes = [(query + 2 * key, hidden), (hidden, query), (2 * intermediate, hidden), (hidden, intermediate)]
    shapes = shapes * config["num_hidden_layers"] + [(config["vocab_size"], hidden)]
    weights = sum(out * inner for out, inner in shapes)
    inputs = {inner: torch.randn(rows, inner) for _, inner in shapes}
    with torch.inference_mode():
        layers = [(Linear(torch.randn(out, inner)), inputs[inner]) for out, inner in shapes]
        seconds = _median(lambda: [linear(x) for linear, x in layers])
    return {"seconds": seconds, "flops": 2.0 * rows * weights, "bytes": 4.0 * weights}


def loaded_bytes(folder: Path) -> dict[str, float]:
    """Return the bytes in physical memory that loading a model adds to a process that has loaded one before, without
    keys and values, and the bytes of its file."""
    load_model(BUNDLED, lambda config: config.max_context)
    gc.collect()
    before = resident_bytes()
    model = load_model(folder, lambda config: config.max_context)
    gc.collect()
    after, size = resident_bytes(), (folder / "model.safetensors").stat().st_size
    assert model.parameters
    return {"file": float(size)} | ({} if before is None or after is None else {"loaded": after - before})


def ceilings() -> dict[str, float]:
    """Return the machine's best rates: bytes read per second, and float32 operations per second (product of 2048³)."""
    data, square = torch.randn(1 << 27), torch.randn(2048, 2048)
    with torch.inference_mode():
        return {
            "read": data.numel() * 4 / _least(lambda: data.sum()),
            "flops": 2 * 2048**3 / _least(lambda: square @ square),
        }


def _median(work: Callable[[], object]) -> float:
    return statistics.median(_times(work, 20))


def _least(work: Callable[[], object]) -> float:
    return min(_times(work, 5))


def _times(work: Callable[[], object], repeats: int) -> list[float]:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times
