"""Prefill and decode steps beside transformers' own code: ``python -m benchmarks.engine.beside_transformers``.

The models are those of ``branching``, float32, on the same number of threads in one process. Transformers runs its own
model with its own cache, in a loop that takes the most likely token; our engine samples, and its time includes
scheduling and events. 16 branches are a prompt that is continued 16 times: transformers computes it for each of them,
as ``generate`` does with ``num_return_sequences``. Both take turns; medians of the rounds are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine.branching import MODELS, save_model
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, GenerateRequest, SamplingParams

_COLUMNS = "model", "branches", "prefill, ours", "transformers", "times", "step, ours", "transformers", "times"
_SHOWN = "Llama", "Qwen3.5", "LFM2", "DeepSeek-V3", "Gemma 4"
_VOCAB = 7900
PROMPT, STEPS = 256, 32


class Seconds(NamedTuple):
    """Times of one system: of a prompt, and of one decode step."""

    prefill: float
    step: float


def _make_prompt(number: int) -> list[int]:
    """Return a prompt that shares no beginning with those of other numbers."""
    return [7 + (number * 31 + 13 * index * (number + 1)) % _VOCAB for index in range(PROMPT)]


class Ours:
    """Our engine."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._count = 0

    async def measure(self, branches: int) -> Seconds:
        """Measure a prompt with one token after it, and one of the same length with ``STEPS`` more."""
        short, long = await self._time(branches, 1), await self._time(branches, 1 + STEPS)
        return Seconds(short, (long - short) / STEPS)

    async def _time(self, branches: int, tokens: int) -> float:
        self._count += 1
        request = GenerateRequest(
            f"request-{self._count}",
            "model",
            tuple(_make_prompt(self._count)),
            tuple(Branch(1, key, tokens) for key in range(branches)),
            SamplingParams(ignore_eos=True),
        )
        started = time.perf_counter()
        ended = [event async for event in self._engine.generate(request) if isinstance(event, Completion)]
        if len(ended) != branches:
            raise RuntimeError("the request ended without all completions")
        return time.perf_counter() - started


class Transformers:
    """Transformers' model and cache."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._count = 0

    def measure(self, branches: int) -> Seconds:
        """Measure a prompt, computed for each branch, and ``STEPS`` steps after it."""
        self._count += 1
        with torch.inference_mode():
            started = time.perf_counter()
            prompt = torch.tensor([_make_prompt(self._count)] * branches)
            found = self._model(prompt, use_cache=True, logits_to_keep=1)
            computed = time.perf_counter()
            for _ in range(STEPS):
                tokens = found.logits[:, -1:].argmax(-1)
                found = self._model(tokens, past_key_values=found.past_key_values, use_cache=True)
        return Seconds(computed - started, (time.perf_counter() - computed) / STEPS)


async def measure(name: str, counts: Sequence[int], rounds: int) -> list[tuple[str, ...]]:
    """Return a model's rows of the table, one for each number of branches."""
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(name, Path(folder))
        engine = LocalEngine({"model": folder}, EngineOptions(max_running=32))
        try:
            ours, theirs = Ours(engine), Transformers(folder)
            for branches in counts:
                pairs = [(await ours.measure(branches), theirs.measure(branches)) for _ in range(rounds + 1)]
                rows.append((name, str(branches), *_compare(pairs[1:])))  # the first pair compiles
        finally:
            await engine.close()
    return rows


def _compare(pairs: Sequence[tuple[Seconds, Seconds]]) -> list[str]:
    """Return the columns of runs of ours and of transformers, in milliseconds."""
    columns: list[str] = []
    for part in range(2):
        ours, theirs = (1000 * statistics.median(pair[system][part] for pair in pairs) for system in (0, 1))
        columns += [f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.1f}"]
    return columns


def main() -> None:
    """Print the table, and write it with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(_SHOWN), help=f"names of {', '.join(MODELS)}, separated by commas")
    parser.add_argument("--branches", default="1,16", help="numbers of branches, separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each system; medians are shown")
    parser.add_argument("--threads", type=int, help="of both systems; default: torch's")
    parser.add_argument("--out", type=Path, help="folder for table.md")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    counts = [int(count) for count in arguments.branches.split(",")]
    rows: list[tuple[str, ...]] = []
    for name in arguments.models.split(","):
        rows += asyncio.run(measure(name, counts, arguments.rounds))
        print(f"{name} is measured", file=sys.stderr)
    table = Table(*_COLUMNS)
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        lines = [_COLUMNS, ("---", "---:", *["---:"] * (len(_COLUMNS) - 2)), *rows]
        (arguments.out / "table.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))


if __name__ == "__main__":
    main()
