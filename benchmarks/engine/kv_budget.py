"""Accuracy and speed with a bound on the keys of thoughts: ``python -m benchmarks.engine.kv_budget``.

python -m benchmarks.engine.kv_budget --out benchmarks/results/kv-budget --model policy-thinking --suite countdown
python -m benchmarks.engine.kv_budget --out benchmarks/results/kv-budget --report-only

*Accuracy*: of a sampled solution, with a bootstrap over problems of its difference to the one without a bound.
*Speed*: branches of one length side by side, one budget after the other in each round, medians of the rounds. What is
done is kept in a file for each model, so that the same command goes on where it was stopped; rows of the last report
that no file renews stay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.real.tasks import MODEL_NAME, find_model
from benchmarks.selection.collect import read_items
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, GenerateRequest, SamplingParams, TokenizeRequest, Tokens
from engine.threads.processors import choose_threads
from reasoner.admission.resolve import resolve_program_job
from reasoner.answers.equivalence import Equivalence
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import open_suite
from reasoner.evaluation.suites.suite import Suite
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.run import open_search

_BUNDLED = Path(__file__).parents[2] / "reasoner" / "bundled"
_NUM_RESAMPLES = 2000
_MODEL = "m"
_UNBOUNDED = 1 << 40


@dataclass(frozen=True, slots=True)
class Measured:
    """The samples of a problem with one seed and budget, or with ``problem`` empty one timed round."""

    case: str
    budget: int | None
    problem: str
    seed: int
    num_right: int
    num_samples: int
    tokens: int
    dropped: int
    seconds: float


async def measure(options: argparse.Namespace, file: Path) -> None:
    """Add what the file lacks."""
    done = {(item["budget"], item["problem"], item["seed"]) for item in read_items(file)}
    suite = open_suite(options.suite, limit=options.problems)
    engine = LocalEngine({_MODEL: _find_model(options.model)}, EngineOptions())
    budgets: list[int | None] = [None, *map(int, options.budgets.split(","))]
    try:
        for problem in suite.problems:
            for seed in range(options.seeds):
                for budget in budgets:
                    if (budget, problem.id, seed) not in done:
                        _write(file, await _sample(options, suite, problem, seed, budget, engine))
            print(f"{options.name}: {problem.id}", file=sys.stderr, flush=True)
        prompt = await engine.tokenize(TokenizeRequest(_MODEL, suite.problems[0].to_messages()))
        for each in range(options.rounds):
            for budget in budgets:
                if (budget, "", each) not in done:
                    _write(file, await _time(options, prompt, budget, each, engine))
    finally:
        await engine.close()


def _find_model(name: str) -> Path:
    if name == MODEL_NAME:
        return find_model()
    return _BUNDLED / name if (_BUNDLED / name).is_dir() else Path(name)


def _write(file: Path, measured: Measured) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(measured)) + "\n")


async def _sample(
    options: argparse.Namespace, suite: Suite, problem: Problem, seed: int, budget: int | None, engine: LocalEngine
) -> Measured:
    request = {
        "messages": problem.to_messages(),
        "model": _MODEL,
        "strategy": {"name": "self_consistency", "n": options.n},
        "sampling": {
            "temperature": suite.temperature if options.temperature is None else options.temperature,
            "max_tokens": options.max_tokens,
            "kv_budget": budget,
        },
        "budget": {"thinking_tokens": options.thinking_tokens} if options.thinking_tokens else {},
        "answer": suite.answer_spec,
        "prompt": options.prompt,
        "seed": seed,
    }
    spec = resolve_program_job(JobRequest.model_validate(request), {})
    started = time.perf_counter()
    async with open_search(spec, engine, MemoryJournal()) as search:
        async for _ in search.complete([search.root], options.n):
            pass
        seconds = time.perf_counter() - started
        nodes = search.root.children
        right = [await suite.check(problem, node.answer, Equivalence()) for node in nodes]
        tokens, dropped = sum(node.tokens for node in nodes), search.ledger.usage.dropped
    return Measured(options.name, budget, problem.id, seed, sum(right), len(nodes), tokens, dropped, seconds)


async def _time(
    options: argparse.Namespace, prompt: Tokens, budget: int | None, number: int, engine: LocalEngine
) -> Measured:
    await engine.clear_cache()
    sampling = SamplingParams(ignore_eos=True, kv_budget=budget)
    branches = tuple(Branch(number, key, options.length) for key in range(options.branches))
    request = GenerateRequest(f"{budget}-{number}", _MODEL, prompt, branches, sampling, draft=False)
    started = time.perf_counter()
    done = [one async for one in engine.generate(request) if isinstance(one, Completion)]
    seconds = time.perf_counter() - started
    tokens, dropped = sum(len(one.token_ids) for one in done), sum(one.dropped_tokens for one in done)
    return Measured(options.name, budget, "", number, 0, len(done), tokens, dropped, seconds)


def write_report(folder: Path) -> str:
    """Write ``table.md`` and ``results.json``; return the table. Values of earlier reports that no file has stay."""
    results = folder / "results.json"
    known = json.loads(results.read_text())["rows"] if results.exists() else []
    by_case = {(row["case"], row["budget"]): row for row in known}
    for file in folder.glob("*.jsonl"):
        for row in _summarize(read_items(file)):
            by_case.setdefault((row["case"], row["budget"]), {}).update(row)
    rows = sorted(by_case.values(), key=lambda row: (row["case"], -(row["budget"] or _UNBOUNDED)))
    results.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    names = ["model", "budget", "accuracy", "difference", "95 % interval", "tokens of a solution", "dropped"]
    names += ["tokens/s", "of no bound", "kept of a long branch"]
    lines = [names, ["---"] * len(names)]
    for row in rows:
        low, high = row["interval"]
        lines.append(
            [
                row["case"],
                "–" if row["budget"] is None else str(row["budget"]),
                f"{row['accuracy']:.3f}",
                *(("–", "–") if row["budget"] is None else (f"{row['difference']:+.3f}", f"{low:+.3f} to {high:+.3f}")),
                f"{row['tokens']:.0f}",
                f"{row['dropped']:.0f}",
                f"{row['speed']:.0f}",
                f"{row['ratio']:.2f}",
                f"{row['kept']:.0%}",
            ]
        )
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
    (folder / "table.md").write_text(text)
    return text


def _summarize(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_budget: dict[int | None, list[Mapping[str, Any]]] = defaultdict(list)
    for item in items:
        by_budget[item["budget"]].append(item)
    plain, rows = by_budget[None], []
    for budget, own in by_budget.items():
        row: dict[str, Any] = {"case": own[0]["case"], "budget": budget}
        if samples := [one for one in own if one["problem"]]:
            count = sum(one["num_samples"] for one in samples)
            row["accuracy"] = sum(one["num_right"] for one in samples) / count
            row["difference"], row["interval"] = _compare(samples, plain)
            row["tokens"] = sum(one["tokens"] for one in samples) / count
            row["dropped"] = sum(one["dropped"] for one in samples) / count
        if timed := [one for one in own if not one["problem"]]:
            row["speed"] = _find_speed(timed)
            row["ratio"] = row["speed"] / _find_speed(plain)
            row["kept"] = 1 - sum(one["dropped"] for one in timed) / sum(one["tokens"] for one in timed)
        rows.append(row)
    return rows


def _find_speed(items: Sequence[Mapping[str, Any]]) -> float:
    """Return the median of the tokens per second of the timed rounds."""
    return float(statistics.median(one["tokens"] / one["seconds"] for one in items if not one["problem"]))


def _compare(own: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> tuple[float, tuple[float, float]]:
    """Return the difference of accuracies over the same problems and seeds, and its interval over problems."""
    base = {(one["problem"], one["seed"]): one["num_right"] / one["num_samples"] for one in plain if one["problem"]}
    by_problem: dict[str, list[float]] = defaultdict(list)
    for one in own:
        by_problem[one["problem"]].append(one["num_right"] / one["num_samples"] - base[one["problem"], one["seed"]])
    means, rng = [statistics.fmean(values) for values in by_problem.values()], random.Random(0)
    found = sorted(statistics.fmean(rng.choices(means, k=len(means))) for _ in range(_NUM_RESAMPLES))
    return statistics.fmean(means), (found[int(0.025 * len(found))], found[int(0.975 * len(found))])


def main() -> None:
    """Measure what is missing and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results and the table")
    parser.add_argument("--report-only", action="store_true", help="make the table of the results that there are")
    parser.add_argument("--model", default="policy-thinking", help="a bundled model, smollm2 or a file (%(default)s)")
    parser.add_argument("--suite", default="countdown", help="a suite of 'reasoner eval' (%(default)s)")
    parser.add_argument("--name", help="name in the table; default: the model")
    parser.add_argument("--budgets", default="512,384,256,192,128", help="numbers of tokens (%(default)s)")
    parser.add_argument("--problems", type=int, default=40, help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--n", type=int, default=8, help="samples of each problem and seed (%(default)s)")
    parser.add_argument("--max-tokens", type=int, help="longest solution")
    parser.add_argument("--thinking-tokens", type=int, help="longest thought")
    parser.add_argument("--prompt", help="prompt of a job, such as {problem}; default: the service's")
    parser.add_argument("--temperature", type=float, help="default: the suite's")
    parser.add_argument("--branches", type=int, default=16, help="branches of a timed round (%(default)s)")
    parser.add_argument("--length", type=int, default=1800, help="tokens of each (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(choose_threads(options.threads).number)
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.report_only:
        options.name = options.name or Path(options.model).name
        asyncio.run(measure(options, options.out / f"{options.name}.jsonl"))
    print(write_report(options.out))


if __name__ == "__main__":
    main()
