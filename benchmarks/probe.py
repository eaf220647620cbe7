"""Compare the ways to score a solution: a probe, the bundled PRM, and the policy's own log-probability.

``python -m benchmarks.probe`` fits a probe for a bundled policy on rollouts of its training problems, then samples
solutions of new problems step by step and prints, for each task, how well the scores of steps separate right solutions
from wrong ones (AUC), and the tokens and microseconds of a score. A solution's own outcome labels all of its steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from api.studies.known_answers import LabelledProblems
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.request_checks import require_ids
from engine.protocol.types import Branch, Completion, GenerateRequest, SamplingParams, TokenizeRequest
from engine.runner.probe import Probe, ProbeReader
from prm.rollouts.rollouts import RolloutPlan, RolloutProblem, roll_out
from prm.scorers.steps import StepChain, StepScorer
from prm.training.probe import ProbePlan, TrainedProbe, train_probe
from prm.training.validation import auc
from workers.config.types import BUNDLED_PRM, require_model_folder

SEPARATOR = "\n\n"
MAX_STEPS = 32
_TIMED_READS = 2000


@dataclass(slots=True)
class Scores:
    """Scores of all steps of a task, with the label of each, and what the PRM's scores took."""

    probe: list[float] = field(default_factory=list)
    prm: list[float] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    labels: list[bool] = field(default_factory=list)
    is_last: list[bool] = field(default_factory=list)
    prm_tokens: int = 0
    prm_seconds: float = 0.0


async def fit(task: str, policy: Path, folder: Path, arguments: argparse.Namespace) -> TrainedProbe:
    """Fit a probe on rollouts of training problems, labelled by outcomes."""
    plan = RolloutPlan("policy", solutions=arguments.solutions, completions=0, max_tokens=arguments.max_tokens)
    problems = LabelledProblems.open(task, arguments.train, seed=0)
    engine = LocalEngine({"policy": policy})
    try:
        async with problems:
            await roll_out(problems.problems(), plan, engine, problems.judge, folder / "rollouts.jsonl")
    finally:
        await engine.close()
    trained = train_probe(ProbePlan(str(policy), f"{folder}/rollouts.jsonl", f"{folder}/probe"), lambda *_: None)
    assert trained is not None  # nothing stops it
    return trained


async def measure(task: str, policy: Path, folder: Path, arguments: argparse.Namespace) -> Scores:
    """Score steps of solutions of new problems."""
    problems, scores = LabelledProblems.open(task, arguments.test, seed=1), Scores()
    models = {"policy": policy, "prm": require_model_folder(BUNDLED_PRM, "prm")}
    engine = LocalEngine(models, EngineOptions(probe=f"{folder}/probe"))
    try:
        prm = StepScorer(engine, next(info for info in await engine.models() if info.id == "prm"))
        async with problems:
            for problem in problems.problems():
                branches = [_solve(engine, problem, key, arguments.max_tokens) for key in range(arguments.solutions)]
                for steps in await asyncio.gather(*branches):
                    finished = bool(steps) and steps[-1].finish_reason == "stop"
                    right = await problems.judge(problem, "".join(step.text for step in steps), finished)
                    await _add(scores, prm, problem, steps, right)
    finally:
        await engine.close()
    return scores


async def _solve(engine: LocalEngine, problem: RolloutProblem, key: int, max_tokens: int) -> list[Completion]:
    """Return the steps of one solution that are not blank."""
    tokens = await engine.tokenize(TokenizeRequest("policy", [{"role": "user", "content": problem.question}]))
    steps: list[Completion] = []
    for index in range(MAX_STEPS):
        branch = Branch(int(problem.key, 16) + index, key, max_tokens)
        sampling = SamplingParams(stop=(SEPARATOR,))
        request = GenerateRequest(uuid.uuid4().hex, "policy", tokens, (branch,), sampling, probe=True)
        [step] = [event async for event in engine.generate(request) if isinstance(event, Completion)]
        tokens += require_ids(step.token_ids)
        if step.text.strip():
            steps.append(step)
        if step.stop != SEPARATOR:
            break
    return steps


async def _add(
    scores: Scores, prm: StepScorer, problem: RolloutProblem, steps: Sequence[Completion], is_right: bool
) -> None:
    prompt = await prm.encode_question([{"role": "user", "content": problem.question}])
    texts = tuple(step.text.removesuffix(SEPARATOR).strip() for step in steps)
    for index, step in enumerate(steps):  # one by one, as a tree search does
        started = time.perf_counter()
        [reading] = await prm.score(prompt, [StepChain(texts[: index + 1], index)])
        scores.prm_seconds += time.perf_counter() - started
        scores.prm_tokens += reading.computed
        scores.prm.append((reading.scores or (0.0,))[-1])
        scores.probe.append(float("nan") if step.probe is None else step.probe)
        scores.logprob.append(step.logprob / len(step.token_ids))
        scores.labels.append(is_right)
        scores.is_last.append(index == len(steps) - 1)


def time_reads(folder: Path) -> float:
    """Return the microseconds that the engine takes to read one score."""
    settings = json.loads((folder / "probe" / "probe.json").read_text())
    layers = tuple(settings["layers"])
    from safetensors.numpy import load_file

    tensors = load_file(folder / "probe" / "probe.safetensors")
    probe = Probe("", layers, tensors["weight"].astype(np.float64), tensors["bias"].astype(np.float64))
    width = probe.weight.shape[1] // len(layers)
    kept = {layer: torch.randn(8, width) for layer in layers}
    reader = ProbeReader(probe, kept=kept, hidden=kept[layers[-1]], rows=None, num_layers=0)
    started = time.perf_counter()
    for index in range(_TIMED_READS):
        reader.read(index % 8)
    return (time.perf_counter() - started) / _TIMED_READS * 1e6


def row(task: str, trained: TrainedProbe, scores: Scores, microseconds: float) -> dict[str, Any]:
    """Return the results of one task."""
    labels, last = np.array(scores.labels), np.array(scores.is_last)
    document: dict[str, Any] = {"task": task, "steps": len(labels), "right": float(labels.mean())}
    for name in ("probe", "prm", "logprob"):
        values = np.array(getattr(scores, name))
        document |= {f"{name}_auc": auc(values, labels), f"{name}_auc_of_solutions": auc(values[last], labels[last])}
    return document | {
        "layers": trained.layers,
        "auc_by_layer": {result.layer: result.test for result in trained.by_layer},
        "probe_microseconds": microseconds,
        "prm_microseconds": scores.prm_seconds / len(labels) * 1e6,
        "prm_tokens": scores.prm_tokens / len(labels),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="policy", help="A bundled policy, a folder or a GGUF file.")
    parser.add_argument("--tasks", default="countdown,words", help="Suites, separated by commas.")
    parser.add_argument("--train", type=int, default=400, help="Problems to fit on.")
    parser.add_argument("--test", type=int, default=100, help="Problems to measure on.")
    parser.add_argument("--solutions", type=int, default=8, help="Solutions of each problem.")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--out", type=Path, help="Folder for results.json and table.md.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    policy, rows = require_model_folder(arguments.policy, "policy"), []
    for task in arguments.tasks.split(","):
        with tempfile.TemporaryDirectory() as folder:
            trained = asyncio.run(fit(task, policy, Path(folder), arguments))
            scores = asyncio.run(measure(task, policy, Path(folder), arguments))
            rows.append(row(task, trained, scores, time_reads(Path(folder))))
    document = json.dumps({"policy": arguments.policy, "rows": rows}, indent=2)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "results.json").write_text(document + "\n")
        (arguments.out / "table.md").write_text(format_table(rows))
    print(document if arguments.json else format_table(rows))


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the results, and the AUC of each layer."""
    lines = [
        "| task | steps | score | AUC, steps | AUC, solutions | tokens per score | µs per score |",
        "|---|" + "---:|" * 6,
    ]
    for result in rows:
        costs = {"probe": ("0", f"{result['probe_microseconds']:.0f}"), "logprob": ("0", "0")}
        costs["prm"] = (f"{result['prm_tokens']:.1f}", f"{result['prm_microseconds']:.0f}")
        for name, title in (("probe", "probe"), ("prm", "bundled PRM"), ("logprob", "mean log-probability")):
            aucs = (f"{result[f'{name}_auc']:.3f}", f"{result[f'{name}_auc_of_solutions']:.3f}")
            lines.append(f"| {' | '.join((result['task'], str(result['steps']), title, *aucs, *costs[name]))} |")
    lines.append("")
    for result in rows:
        layers = ", ".join(f"{layer}: {value:.3f}" for layer, value in result["auc_by_layer"].items())
        read = ", ".join(map(str, result["layers"]))
        lines.append(f"* {result['task']}: AUC on test questions by layer {layers}; the probe reads {read}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
