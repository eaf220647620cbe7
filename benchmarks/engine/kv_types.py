"""Step time with quantized keys and values: ``python -m benchmarks.engine.kv_types``.

Milliseconds of a step of the 50M checkpoint that generates a token for each of 16 sequences without common prefixes, by
context length, on one thread. Types take turns.
"""

from __future__ import annotations

import random
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine.checkpoint import SIZES, cache_folder, checkpoint
from engine.core.engine_core import EngineCore
from engine.device import KV_DTYPES
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, GenerateRequest, SamplingParams
from engine.scheduler.sequence import Request

SEQUENCES, STEPS, LENGTHS = 16, 40, (100, 500, 2000)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    table = Table("tokens before", *(f"{name}, ms" for name in KV_DTYPES))
    for length in LENGTHS:
        table.add_row(str(length), *(f"{time_of_step:.1f}" for time_of_step in measure_steps(length).values()))
    Console().print(table)


def measure_steps(length: int) -> dict[str, float]:
    """Return the median milliseconds of a step by type, with ``length`` tokens before."""
    engines = [_filled(name, length) for name in KV_DTYPES]
    times = [[_step(engine) for engine in engines] for _ in range(STEPS)]
    medians = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    return dict(zip(KV_DTYPES, medians, strict=True))


def _filled(kv_dtype: str, length: int) -> EngineCore:
    """Return an engine whose prompts are prefilled."""
    options = EngineOptions(kv_tokens=SEQUENCES * (length + 3 * STEPS), kv_dtype=kv_dtype)
    engine = EngineCore("50M", checkpoint("50M", SIZES["50M"], cache_folder()), options)
    rng = random.Random(0)
    for key in range(SEQUENCES):
        in_flight = Request(str(key), lambda _: None)
        law = SamplingParams(temperature=1.0, ignore_eos=True)
        prompt = tuple(rng.choices(range(1000, 30000), k=length))
        engine.model.add_branches(
            GenerateRequest(in_flight.request_id, "50M", prompt, (Branch(0, key, 2 * STEPS),), law), in_flight
        )
        engine.submit(in_flight)
    drawn = 0
    while drawn < SEQUENCES:  # some sequences decode while other prompts are prefilled
        before = engine.stats.generated_tokens
        engine.step()
        drawn = engine.stats.generated_tokens - before
    return engine


def _step(engine: EngineCore) -> float:
    start = time.process_time()
    engine.step()
    return time.process_time() - start


if __name__ == "__main__":
    main()
