"""Time decoding with weights of 16, 8 and 4 bits in one run, and write a table of floors, ratios and goals.

``python -m benchmarks.gpu.rates --out FILE`` on a GPU; with ``--tiny`` anywhere, as a test of itself. Each type of
weights is loaded once. Goals in tokens per second are those of an H200, and are left out on other GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu import decode
from benchmarks.kernels.dry_run import TINY_MODEL
from benchmarks.kernels.measure import copy_rate

GOALS_GPU = "H200"
"""GPUs, by a part of their name, that goals in tokens per second are for."""


class Goal(NamedTuple):
    """What a row of the table should reach; ``None`` for nothing."""

    share: float | None = None
    """Floor of a step, divided by its time."""
    rate: float | None = None
    """Tokens per second on an H200."""
    gain: float | None = None
    """Time of bf16's step, divided by the step's."""


class Rows(NamedTuple):
    """Rows of the table with the same weights and keys, in one engine."""

    weights: str
    kv_dtype: str
    goals: Mapping[int, Goal]
    """Goals by the number of sequences."""


CONTEXT, TINY_CONTEXT = 2048, 64
ROWS = (
    Rows(
        "bf16",
        "auto",
        {1: Goal(0.8, 250), 4: Goal(), 8: Goal(), 16: Goal(0.8, 3_200), 64: Goal(0.8, 7_600)},
    ),
    Rows("fp8", "fp8", {1: Goal(rate=400), 16: Goal(rate=5_500), 64: Goal(rate=13_000)}),
    Rows(
        "int4",
        "auto",
        {1: Goal(gain=2.2), 4: Goal(gain=2.2), 8: Goal(gain=2.2), 16: Goal(gain=2.2), 64: Goal(gain=1.0)},
    ),
)
TINY_ROWS = tuple(Rows(rows.weights, rows.kv_dtype, {1: Goal(), 2: Goal()}) for rows in ROWS)


@dataclass(frozen=True)
class Timing:
    """A row of the table."""

    weights: str
    kv_dtype: str
    batch: int
    step_ms: float
    floor_ms: float
    """Not a number without a GPU, whose copy is not timed."""
    gain: float | None
    """Time of a step of bf16 in the same run, divided by this one's; ``None`` for bf16 itself."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return 1e3 * self.batch / self.step_ms


def main(argv: Sequence[str] | None = None) -> int:
    """Time all rows and write the table after each; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.rates", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file of the table")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on whatever device there is")
    arguments = parser.parse_args(argv)
    sizes: decode.Sizes = TINY_MODEL if arguments.tiny else decode.SIZES
    copy = copy_rate(torch.device("cuda")) if torch.cuda.is_available() else float("nan")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    timings: list[Timing] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        decode.write_checkpoint(folder, sizes)
        if not torch.cuda.is_available():
            stack.enter_context(decode.emulated_gpu())
        for rows in TINY_ROWS if arguments.tiny else ROWS:
            time_rows(folder, rows, sizes, timings, copy=copy, tiny=arguments.tiny)
            arguments.out.write_text(markdown(timings, gpu), encoding="utf-8")
            decode.free_memory()
    print(markdown(timings, gpu))
    return 0


def time_rows(folder: Path, rows: Rows, sizes: decode.Sizes, timings: list[Timing], *, copy: float, tiny: bool) -> None:
    """Append a row for each number of sequences to ``timings``; print the kernels that take most of each step.

    ``copy``: bytes that the GPU copies per second.
    """
    works = [decode.Work(batch, TINY_CONTEXT if tiny else CONTEXT) for batch in rows.goals]
    with decode.random_weights(decode.FORMATS[rows.weights].read):
        core = decode.create_core(folder, works, rows.kv_dtype, tiny=tiny)
        for work in works:
            decode.fill(core, work)
            step_ms = statistics.median(decode.time_decoding(core, tiny=tiny))
            floor = decode.count_bytes(work, sizes, weights=rows.weights, kv_dtype=rows.kv_dtype) / copy
            bf16 = [one.step_ms for one in timings if (one.weights, one.batch) == ("bf16", work.batch)]
            gain = bf16[0] / step_ms if bf16 else None
            timings.append(Timing(rows.weights, rows.kv_dtype, work.batch, step_ms, 1e3 * floor, gain))
            print(f"{rows.weights}, {rows.kv_dtype} keys, {work.batch} × {work.context}: {step_ms:.2f} ms", flush=True)
            if torch.cuda.is_available():
                print("\n".join(decode.describe_kernels(decode.profile_kernels(core))), flush=True)
            core.cancel(lambda _: True)
            core.clear_cache()


def markdown(timings: Sequence[Timing], gpu: str) -> str:
    """Return the table. ``gpu``: the name of the GPU, which decides whether goals in tokens per second count."""
    lines = [
        f"{gpu}. Shapes of Llama 3.1 8B, random weights, prompts of {CONTEXT} tokens. The floor is the time in which "
        "the GPU copies as many bytes as a step must read.",
        "",
        "| weights | keys | batch | step | floor | floor / step | tokens/s | bf16's step / step | goal | |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    goals = {(rows.weights, batch): goal for rows in ROWS for batch, goal in rows.goals.items()}
    for one in timings:
        share, floor = (f"{one.floor_ms / one.step_ms:.2f}", f"{one.floor_ms:.2f} ms") if one.floor_ms > 0 else ("", "")
        keys = "bf16" if one.kv_dtype == "auto" else one.kv_dtype
        texts, met = judge(goals.get((one.weights, one.batch), Goal()), one, has_rate=GOALS_GPU in gpu)
        verdict = "" if not texts else "met" if met else "missed"
        lines.append(
            f"| {one.weights} | {keys} | {one.batch} | {one.step_ms:.2f} ms | {floor} | {share} "
            f"| {one.rate:,.0f} | {'' if one.gain is None else f'{one.gain:.2f}'} | {', '.join(texts)} | {verdict} |"
        )
    return "\n".join(lines) + "\n"


def judge(goal: Goal, timing: Timing, *, has_rate: bool) -> tuple[list[str], bool]:
    """Return the parts of a goal in words, and True if all of them are met. ``has_rate``: tokens per second count."""
    parts: list[tuple[str, bool]] = []
    if goal.share is not None:
        parts.append((f"{goal.share:.2f} of the floor", timing.floor_ms / timing.step_ms >= goal.share))
    if goal.rate is not None and has_rate:
        parts.append((f"{goal.rate:,.0f} tokens/s", timing.rate >= goal.rate))
    if goal.gain is not None:
        parts.append((f"{goal.gain:.1f} × bf16", timing.gain is not None and timing.gain >= goal.gain))
    return [text for text, _ in parts], all(is_met for _, is_met in parts)


if __name__ == "__main__":
    sys.exit(main())
