"""Measure which steps FlashInfer computes faster on this GPU: ``python -m benchmarks.gpu.flashinfer_times --out FILE``.

The attention of a step is timed as the engine launches it without graphs: its plan, and the kernels of 32 layers of the
shape of Llama 3.1 8B, by Triton's kernels and by FlashInfer's. The times become the GPU's entry in
``engine/attention/flashinfer_times.json``. Steps that FILE has already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.cuda_flashinfer import FlashInferAttention, load_flashinfer
from engine.attention.cuda_triton import TritonAttention
from engine.attention.flashinfer_times import FILE, StepTime
from engine.attention.layer import LayerAttentionConfig
from engine.attention.plan import AttentionCostModel, AttentionMetadata

_CONFIG = LayerAttentionConfig(heads=32, kv_heads=8, head_dim=128, scale=128**-0.5)
_DRY_CONFIG = LayerAttentionConfig(heads=4, kv_heads=2, head_dim=64, scale=0.125)
_PAGE = 16
_CALLS = 32
"""Layers of a step. They use the caches of ``_LAYERS`` in turn, which together exceed the second-level cache."""
_LAYERS = 4
_MAX_KEYS = 1 << 18
_DECODE_CONTEXT = 2048
"""Context of the rows that decode beside a prompt."""


class Shape(NamedTuple):
    """Rows of a step: some that decode, and one with the next tokens of a prompt if it is not of length 0."""

    decoding: int
    context: int
    """Keys of each decoding row."""
    chunk: int = 0
    cached: int = 0
    """Keys of the prompt before the chunk."""

    def lengths(self) -> tuple[list[int], list[int]]:
        """Return each row's new tokens and keys."""
        prompts = 1 if self.chunk else 0
        queries = [1] * self.decoding + [self.chunk] * prompts
        return queries, [self.context] * self.decoding + [self.chunk + self.cached] * prompts

    @property
    def size(self) -> tuple[int, int, int]:
        """Number of rows, new tokens and keys."""
        queries, keys = self.lengths()
        return len(queries), sum(queries), sum(keys)


SHAPES = (
    *(
        Shape(rows, context)
        for rows in (1, 8, 64)
        for context in (512, 4096, 32768)
        if rows * context <= _MAX_KEYS
    ),
    *(
        Shape(rows, _DECODE_CONTEXT, chunk, cached)
        for rows in (0, 8, 64)
        for chunk in (64, 512, 2048)
        for cached in (0, 4096)
    ),
)  # fmt: skip
DRY_SHAPES = (Shape(2, 40), Shape(1, 40, 30, 20))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, print all steps and write the GPU's entry; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.flashinfer_times", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file of the measured steps")
    parser.add_argument("--times", type=Path, default=FILE, help="file of the entries by name of GPU")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each step, whose median counts")
    parser.add_argument("--dry-run", action="store_true", help="tiny steps, and no entry")
    arguments = parser.parse_args(argv)
    flashinfer = load_flashinfer()
    if flashinfer is None:
        print("skipped: FlashInfer is not installed, or not in a version that the engine can use")
        return 0
    config, shapes = (_DRY_CONFIG, DRY_SHAPES) if arguments.dry_run else (_CONFIG, SHAPES)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = read_steps(arguments.out)
    with torch.inference_mode():
        for step in measure_steps(shapes, config, device, flashinfer, known=steps, rounds=arguments.rounds):
            steps.append(step)
            arguments.out.write_text(json.dumps([asdict(each) for each in steps], indent=1), encoding="utf-8")
    print(markdown(steps))
    if not arguments.dry_run:
        import triton

        versions = f"torch {torch.__version__}, triton {triton.__version__}, flashinfer {flashinfer.__version__}"
        write_entry(arguments.times, torch.cuda.get_device_name(), steps, versions)
    return 0


def read_steps(path: Path) -> list[StepTime]:
    """Return the steps in a file; none if there is no such file."""
    return [StepTime(**step) for step in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def measure_steps(
    shapes: Iterable[Shape],
    config: LayerAttentionConfig,
    device: torch.device,
    flashinfer: ModuleType,
    *,
    known: Iterable[StepTime],
    rounds: int,
) -> Iterator[StepTime]:
    """Measure the steps that are not ``known``."""
    done = {(step.rows, step.tokens, step.keys) for step in known}
    missing = [shape for shape in shapes if shape.size not in done]
    if not missing:
        return
    num_pages = max(sum(-(-keys // _PAGE) for keys in shape.lengths()[1]) for shape in missing)
    kv = torch.zeros(
        (_LAYERS, 2, config.kv_heads, num_pages, _PAGE, config.head_dim), dtype=torch.bfloat16, device=device
    )
    kv.normal_()
    layers = [config] * _LAYERS
    backends = (
        TritonAttention(layers, kv),
        FlashInferAttention(layers, kv, flashinfer, lambda _: True, has_graphs=False),
    )
    for shape in missing:
        metadata = _lay_out(shape, config, num_pages)
        triton_us, flashinfer_us = (_time(backend, metadata, config, kv, rounds) for backend in backends)
        yield StepTime(*shape.size, triton_us, flashinfer_us)


def _lay_out(shape: Shape, config: LayerAttentionConfig, num_pages: int) -> AttentionMetadata:
    """Return a step of rows that share no pages."""
    queries, keys = (np.array(lengths) for lengths in shape.lengths())
    counts = -(-keys // _PAGE)
    order, table = np.random.default_rng(0).permutation(num_pages), np.zeros((len(keys), counts.max()), np.int64)
    table[np.arange(counts.max()) < counts[:, None]] = order[: counts.sum()]
    cost = AttentionCostModel(2 * config.kv_heads * config.head_dim * 2)
    heads_per_kv = config.heads // config.kv_heads
    return AttentionMetadata(table, queries, keys, _PAGE, num_pages, config.kv_heads, heads_per_kv, cost)


def _time(
    backend: TritonAttention, metadata: AttentionMetadata, config: LayerAttentionConfig, kv: Tensor, rounds: int
) -> float:
    """Return the microseconds of one layer's share of a step, in the median."""
    tokens, num_heads = int(metadata.query_lens.sum()), config.heads + 2 * config.kv_heads
    qkv = torch.randn(tokens, num_heads, config.head_dim, dtype=kv.dtype, device=kv.device)
    qk, v = torch.split(qkv, [num_heads - config.kv_heads, config.kv_heads], dim=1)
    angles = [torch.rand(tokens, config.head_dim, device=kv.device) for _ in range(2)]

    def compute() -> None:
        backend.prepare(metadata)
        for call in range(_CALLS):
            backend.forward_unrotated(call % _LAYERS, qk, v, *angles)

    _seconds(compute, kv.device)  # compiles
    return round(statistics.median(_seconds(compute, kv.device) for _ in range(rounds)) / _CALLS * 1e6, 2)


def _seconds(compute: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    compute()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def markdown(steps: Iterable[StepTime]) -> str:
    """Format the steps."""
    lines = ["| step | rows | tokens | keys | Triton | FlashInfer |", "|---|---:|---:|---:|---:|---:|"]
    for step in steps:
        times = f"{step.triton_us:.1f} µs | {step.flashinfer_us:.1f} µs"
        lines.append(f"| {step.kind} | {step.rows} | {step.tokens} | {step.keys} | {times} |")
    return "\n".join(lines)


def write_entry(path: Path, name: str, steps: Iterable[StepTime], source: str) -> None:
    """Write a GPU's entry and leave the others as they are."""
    entries = json.loads(path.read_text(encoding="utf-8"))
    entries[name] = {"steps": [asdict(step) for step in steps], "source": source}
    path.write_text(json.dumps(dict(sorted(entries.items())), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
