"""Parked searches on an engine whose memory holds a small part of them: ``python -m benchmarks.engine.parked``.

Each search reads a prompt of 256 tokens of its own, writes 64 and then waits, with its pages leased. When all wait, all
are woken at once, and each writes 16 more; then some of them one after the other, which write one token. With
``--cache-disk`` of the engine, what memory has no room for comes back from disk: *cold*, after the system's own cache
of these files was dropped, and *warm*, once more with it. Without, it is computed again. Models are bundled ones, or
random ones of about 30M parameters (``benchmarks.engine.branching``), and are computed in deterministic mode: all ways
must give the same bits.
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
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine.branching import save_model
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.request_checks import require_ids
from engine.protocol.types import Branch, Completion, GenerateRequest, SamplingParams, TokenIds
from engine.threads.processors import choose_threads

PROMPT, PARKED, WOKEN, SINGLE = 256, 64, 16, 30
_COLUMNS = (
    "model",
    "searches",
    "in memory",
    "way",
    "tokens computed to wake all",
    "s to wake all",
    "first token of one, ms",
    "bits",
)
_CASES = "policy:1000,policy-large:300,Llama:60,Qwen3.5:60"
_BUNDLED = Path(__file__).parents[2] / "reasoner" / "bundled"
_SHARE = 0.05
"""Part of all tokens that memory holds."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Measured wake-ups: of all searches at once, and of one after the other."""

    seconds: float
    computed: int
    first_token_seconds: float
    completions: tuple[Completion, ...]


class Searches:
    """Parks and wakes searches on one engine."""

    def __init__(self, engine: LocalEngine, number: int) -> None:
        self._engine, self._number = engine, number
        self._prefixes: list[TokenIds] = []
        self._count = 0

    async def park(self) -> None:
        """Run the first part of all searches."""
        prompts = [_create_prompt(search) for search in range(self._number)]
        found = await self._complete(range(self._number), prompts, PARKED)
        self._prefixes = [(*prompt, *require_ids(one.token_ids)) for prompt, one in zip(prompts, found, strict=True)]

    async def wake(self) -> Wake:
        """Wake all searches at once, and then some alone."""
        started = time.perf_counter()
        found = await self._complete(range(self._number), self._prefixes, WOKEN)
        seconds = time.perf_counter() - started
        single: list[float] = []
        for search in range(0, self._number, -(-self._number // SINGLE)):
            started = time.perf_counter()
            await self._complete([search], [self._prefixes[search]], 1)
            single.append(time.perf_counter() - started)
        computed = sum(one.prompt_tokens - one.cached_tokens + len(one.token_ids) for one in found)
        return Wake(seconds, computed, statistics.median(single), tuple(found))

    async def _complete(self, searches: Sequence[int], prompts: Sequence[TokenIds], count: int) -> list[Completion]:
        runs = (self._run(search, prompt, count) for search, prompt in zip(searches, prompts, strict=True))
        return list(await asyncio.gather(*runs))

    async def _run(self, search: int, prompt: TokenIds, count: int) -> Completion:
        self._count += 1
        request = GenerateRequest(
            f"request-{self._count}",
            "model",
            prompt,
            (Branch(search, count, count),),
            SamplingParams(ignore_eos=True),
            pin_key=f"search {search}",
        )
        async for event in self._engine.generate(request):
            if isinstance(event, Completion):
                return event
        raise RuntimeError("the request ended without a completion")


def _create_prompt(search: int) -> TokenIds:
    return tuple(20 + (search * 7919 + 13 * index + search * index * index) % 790 for index in range(PROMPT))


def drop_file_cache(folder: Path) -> None:
    """Make the system read the files of a folder from disk again."""
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def measure(name: str, number: int, disk: Path) -> list[tuple[str, ...]]:
    """Return the rows of a model and a number of searches."""
    options = EngineOptions(
        deterministic=True,
        max_running=32,
        kv_tokens=int(number * (PROMPT + PARKED) * _SHARE),
        state_slots=128,
    )
    wakes: dict[str, Wake] = {}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=disk) as cache:
        model = _BUNDLED / name
        if not model.is_dir():
            model = Path(folder)
            save_model(name, model)
        engine = LocalEngine({"model": model}, options)
        try:
            searches = Searches(engine, number)
            await searches.park()
            wakes["computed again"] = await searches.wake()
        finally:
            await engine.close()
        engine = LocalEngine({"model": model}, _add_disk(options, cache))
        try:
            searches = Searches(engine, number)
            await searches.park()
            await asyncio.to_thread(drop_file_cache, Path(cache))
            wakes["from disk, cold"] = await searches.wake()
            wakes["from disk, warm"] = await searches.wake()
            print(engine.stats()["model"].offloading, file=sys.stderr)
        finally:
            await engine.close()
    return _list_rows(name, number, wakes)


def _add_disk(options: EngineOptions, folder: str) -> EngineOptions:
    return replace(options, cache_disk=folder, cache_disk_gb=16.0)


def _list_rows(name: str, number: int, wakes: dict[str, Wake]) -> list[tuple[str, ...]]:
    [expected, *_] = wakes.values()
    return [
        (
            name,
            f"{number:,}",
            f"{_SHARE:.0%}",
            way,
            f"{wake.computed:,}",
            f"{wake.seconds:.1f}",
            f"{1000 * wake.first_token_seconds:.1f}",
            "equal" if _have_same_bits(wake, expected) else "different",
        )
        for way, wake in wakes.items()
    ]


def _have_same_bits(first: Wake, second: Wake) -> bool:
    pairs = zip(first.completions, second.completions, strict=True)
    return all((one.token_ids, one.logprob) == (other.token_ids, other.logprob) for one, other in pairs)


def main() -> None:
    """Print the table, and write it with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=_CASES, help="models and numbers of searches, separated by commas")
    parser.add_argument("--threads", type=int, help="threads of a step; by default one for each core")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk to measure")
    parser.add_argument("--out", type=Path, help="folder for table.md")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows: list[tuple[str, ...]] = []
    torch.set_num_threads(choose_threads(arguments.threads).number)
    for case in arguments.cases.split(","):
        name, _, number = case.partition(":")
        rows += asyncio.run(measure(name, int(number), arguments.disk))
        print(f"{name} is measured", file=sys.stderr)
        if arguments.out is not None:
            write_table(arguments.out, rows)
    table = Table(*_COLUMNS)
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)


def write_table(folder: Path, rows: Sequence[tuple[str, ...]]) -> None:
    """Write ``table.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *rows]
    (folder / "table.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))


if __name__ == "__main__":
    main()
