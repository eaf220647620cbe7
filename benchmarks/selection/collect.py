"""Samples of each problem with the scores of several verifiers, one line of JSON for each problem and seed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import ScoreItem, ScoreRequest
from engine.text.json_lines import read_json_lines
from reasoner.admission.resolve import resolve_program_job
from reasoner.answers.equivalence import Equivalence
from reasoner.answers.votes import group_equivalent
from reasoner.budget.ledger import Ledger
from reasoner.budget.usage import Usage
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import open_suite
from reasoner.evaluation.suites.suite import Suite
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import JobSpec
from reasoner.run import open_search, run_job
from reasoner.search.scoring import NodeScore
from reasoner.search.search import Search
from reasoner.tree import Node
from reasoner.verifiers.context import VerifierContext
from reasoner.verifiers.registry import open_scorer

BUNDLED = Path(__file__).parents[2] / "reasoner" / "bundled"
_GRADE_ROOM = 64
"""Tokens of a question about two solutions."""
POLICY = "policy"
"""Name of the model that writes, whichever it is."""


@dataclass(frozen=True, slots=True)
class Collection:
    """A suite, the models, and the verifiers by their names in the table."""

    suite: str
    name: str
    out: Path
    model: str
    prm: str | None
    adapter: str | None
    probe: str | None
    """Folder of the model's probe, if it is not beside the weights."""
    verifiers: Mapping[str, dict[str, Any]]
    tournament: int
    problems: int
    seeds: int
    n: int
    max_tokens: int
    temperature: float | None
    thinking_tokens: int | None
    prompt: str | None

    @property
    def file(self) -> Path:
        name = "".join(char if char.isalnum() or char in "-_=" else "-" for char in self.name)
        return self.out / f"{name}.jsonl"


@dataclass(frozen=True, slots=True)
class Cost:
    """The tokens that a verifier computed and found cached for all samples of a problem, and its seconds."""

    computed: int
    cached: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Scored:
    """The samples of one problem and seed, in the order of their paths.

    ``classes`` numbers equivalent answers, ``None`` for a sample without one; ``tokens`` are those generated.
    ``tournament`` is ``None`` or whether its winner is right, with its cost.
    """

    suite: str
    seed: int
    problem: str
    right: list[bool]
    classes: list[int | None]
    tokens: list[int]
    seconds: float
    scores: dict[str, list[float | None]]
    costs: dict[str, Cost]
    tournament: tuple[int, bool, Cost] | None = None


async def collect(plan: Collection) -> None:
    """Add the problems and seeds that the file lacks."""
    plan.out.mkdir(parents=True, exist_ok=True)
    done = {(item["seed"], item["problem"]) for item in read_items(plan.file)}
    suite = open_suite(plan.suite, limit=plan.problems)
    models = {POLICY: _find(plan.model)} | ({"prm": _find(plan.prm)} if plan.prm else {})
    adapters = dict([plan.adapter.split("=", 1)]) if plan.adapter else {}
    engine = LocalEngine(models, EngineOptions(probe=plan.probe or "auto"), adapters=adapters)
    try:
        for seed in range(plan.seeds):
            for number, problem in enumerate(suite.problems, 1):
                if (seed, problem.id) in done:
                    continue
                item = await _measure(plan, suite, problem, seed, engine)
                with plan.file.open("a") as file:
                    file.write(json.dumps(asdict(item)) + "\n")
                print(f"{plan.name}: seed {seed}, {number}/{len(suite.problems)}", file=sys.stderr, flush=True)
    finally:
        await engine.close()


def read_items(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; none if it is not there."""
    return [json.loads(line) for _, line in read_json_lines(file)] if file.exists() else []


async def _measure(plan: Collection, suite: Suite, problem: Problem, seed: int, engine: LocalEngine) -> Scored:
    """Sample, then let each verifier score the same samples."""
    strategy = {"name": "self_consistency", "n": plan.n}
    started = time.perf_counter()
    async with open_search(_create_spec(plan, suite, problem, seed, strategy), engine, MemoryJournal()) as search:
        async for _ in search.complete([search.root], plan.n):
            pass
        seconds = time.perf_counter() - started
        nodes = sorted(search.root.children, key=lambda node: node.path)
        answered = [node for node in nodes if node.answer is not None]
        groups = await group_equivalent(answered, search.spec.answer, search.equivalence)
        classes = {node: number for number, group in enumerate(groups) for node in group}
        right = {node: await suite.check(problem, node.answer, Equivalence()) for node in nodes}
        scores, costs = {}, {}
        for name, verifier in plan.verifiers.items():
            await _warm(engine, nodes)
            spec = _create_spec(plan, suite, problem, seed, {"name": "best_of_n", "n": plan.n}, verifier)
            found, costs[name] = await _score(spec, engine, search, answered)
            scores[name] = [found.get(node) for node in nodes]
        held = None
        if plan.tournament:
            held = await _hold_tournament(plan, suite, problem, seed, engine, answered[: plan.tournament])
    return Scored(
        plan.name,
        seed=seed,
        problem=problem.id,
        right=[right[node] for node in nodes],
        classes=[classes.get(node) for node in nodes],
        tokens=[node.tokens for node in nodes],
        seconds=seconds,
        scores=scores,
        costs=costs,
        tournament=held,
    )


async def _warm(engine: LocalEngine, nodes: Sequence[Node]) -> None:
    """Leave in the cache what sampling left there: the branches, and nothing of an earlier verifier."""
    await engine.clear_cache()
    items = tuple(ScoreItem((node.prefix[:-1],), (0,)) for node in nodes)
    await engine.score(ScoreRequest("warm", POLICY, items, token_ids=(0,)))


async def _score(
    spec: JobSpec, engine: LocalEngine, search: Search, nodes: Sequence[Node]
) -> tuple[dict[Node, float | None], Cost]:
    """Return the scores of nodes by the verifier of a job, and their cost."""
    served = {info.id: info for info in await engine.models()}
    context = VerifierContext(
        spec,
        engine,
        served=served,
        policy=served[POLICY],
        pin_key="selection",
        ledger=Ledger(spec.budget),
        equivalence=search.equivalence,
    )
    started = time.perf_counter()
    scorer = await open_scorer(context)
    remaining = [node for node in nodes if scorer.scorable(node)]
    results: list[NodeScore] = []
    while remaining:
        found = await scorer.score(remaining)
        results += found
        scored = {result.node for result in found}
        remaining = [node for node in remaining if node not in scored]
    spend = sum((result.spend for result in results), Usage())
    cost = Cost(spend.verifier_computed, spend.verifier_cached, time.perf_counter() - started)
    return {result.node: result.score for result in results}, cost


async def _hold_tournament(
    plan: Collection, suite: Suite, problem: Problem, seed: int, engine: LocalEngine, nodes: Sequence[Node]
) -> tuple[int, bool, Cost] | None:
    """Return the number of players, whether the winner is right, and the cost; ``None`` without two players, or where
    the longest two do not fit into the context with the question and room for a grade."""
    lengths = sorted(len(node.prefix) for node in nodes)
    context = {info.id: info.context for info in await engine.models()}[POLICY]
    if len(nodes) < 2 or lengths[-1] + lengths[-2] + _GRADE_ROOM > context:
        return None
    strategy = {"name": "select", "by": "tournament"}
    texts = [node.solution for node in nodes]
    spec = _create_spec(plan, suite, problem, seed, strategy, {"kind": "graded"}, candidates=texts)
    started = time.perf_counter()
    outcome = await run_job(spec, engine, MemoryJournal())
    seconds = time.perf_counter() - started
    is_right = await suite.check(problem, outcome.result.answer, Equivalence())
    usage = outcome.usage
    return len(nodes), is_right, Cost(usage.verifier_computed, usage.verifier_cached, seconds)


def _create_spec(
    plan: Collection,
    suite: Suite,
    problem: Problem,
    seed: int,
    strategy: dict[str, Any],
    verifier: dict[str, Any] | None = None,
    candidates: list[str] | None = None,
) -> JobSpec:
    noise = blake2b(f"{seed}/{problem.id}".encode(), digest_size=8)
    request = JobRequest.model_validate(
        {
            "messages": problem.to_messages(),
            "model": POLICY,
            "strategy": strategy,
            "verifier": verifier,
            "candidates": candidates,
            "sampling": {
                "temperature": suite.temperature if plan.temperature is None else plan.temperature,
                "max_tokens": plan.max_tokens,
            },
            "answer": suite.answer_spec,
            "prompt": plan.prompt,
            "budget": {"thinking_tokens": plan.thinking_tokens} if plan.thinking_tokens else {},
            "seed": int.from_bytes(noise.digest(), "big") >> 1,
        }
    )
    return resolve_program_job(request, {})


def _find(model: str | None) -> Path:
    assert model is not None
    return BUNDLED / model if (BUNDLED / model).is_dir() else Path(model)
