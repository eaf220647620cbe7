"""The service on a running engine of others beside bare requests to it: ``reasoner bench service --engine URL``.

``best of 16``: tokens per second of a job and of one request for the same 16 samples, and the seconds of a core that
the client takes for 1,000 of them: service and broker, or the script. ``beam``: seconds of a search
and of a script that sends the same requests without a search. ``reuse``: the prompt tokens that the server computed,
by its own metrics, and those of an ideal cache. ``verifier``: verifier tokens computed for each generated one there and
on our engine.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import reasoner
from benchmarks.engine.measure import OURS, Listener, Measured, Row
from benchmarks.engine.process import BenchError, installed
from benchmarks.service.deployment import OURS as SERVICE
from benchmarks.service.deployment import Deployment, read_cpu_seconds
from benchmarks.service.traffic import Traffic, ideal_prompt_tokens, recorded
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineClient
from reasoner.admission.resolve import resolve_program_job
from reasoner.budget.usage import Usage
from reasoner.evaluation.suites.registry import load_problems
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.run import run_job
from workers.config.settings import Settings, load_settings
from workers.engines.connect import connect

CASES = ("best of 16", "beam", "reuse", "verifier")
BARE, IDEAL, OUR_ENGINE = "bare requests", "ideal cache", "our engine"
BUNDLED = Path(reasoner.__file__).parent / "bundled"
_SAMPLES = 16
_WAIT_SECONDS = 120
_COMPUTED = 'vllm:prompt_tokens_by_source_total{[^}]*source="local_compute"[^}]*}'
_BLOCK = 'vllm:cache_config_info{[^}]*block_size="(\\d+)"'


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Settings of a run. The models are those of the environment, as for ``reasoner serve``."""

    engine: str
    cases: tuple[str, ...] = CASES
    rounds: int = 5
    problems: int = 12
    """Number of Countdown problems in each round."""
    settings: Settings = field(default_factory=load_settings)


def measure(plan: EnginePlan, listener: Listener) -> Measured:
    """Run the plan. Raises ``BenchError`` if a search fails."""
    measured = Measured(versions=installed(("httpx", "celery", "redis")))
    models = {"engine_url": plan.engine, "model": plan.settings.model}
    bench = _Bench(plan, listener, measured, load_settings(**models), load_texts(plan.problems))
    listener.total(2 * plan.rounds * len(plan.cases))
    if "best of 16" in plan.cases:
        bench.best_of(models)
    searches = asyncio.run(bench.searches()) if {"beam", "reuse", "verifier"} & set(plan.cases) else None
    if searches is not None:
        bench.report_searches(searches)
    return measured


def load_texts(count: int) -> list[str]:
    """Return the texts of held-out Countdown problems."""
    return [problem.text for problem in load_problems("countdown", limit=count)]


@dataclass(slots=True)
class _Searches:
    """Beam searches on the engine, and their requests repeated."""

    seconds: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    computed: float = 0.0
    scored: float = 0.0
    """Tokens that the verifier's server computed."""
    ideal: float = 0.0
    usage: Usage = field(default_factory=Usage)
    own: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class _Bench:
    plan: EnginePlan
    listener: Listener
    measured: Measured
    settings: Settings
    texts: Sequence[str]

    def best_of(self, models: dict[str, Any]) -> None:
        """Measure jobs with 16 samples and a vote, beside one bare request for as many, in turn."""
        rates: dict[str, list[float]] = {OURS: [], BARE: []}
        costs: dict[str, list[float]] = {OURS: [], BARE: []}
        with Deployment(0.0, concurrency=4, models=models) as deployment:
            deployment.start(SERVICE, "worker")
            deployment.start(SERVICE, "api")
            with (
                httpx.Client(trust_env=False, base_url=deployment.url(SERVICE), timeout=_WAIT_SECONDS + 10) as service,
                httpx.Client(trust_env=False, base_url=self.plan.engine, timeout=_WAIT_SECONDS) as server,
            ):
                for turn in range(-1, self.plan.rounds):
                    for way in sorted(rates, reverse=bool(turn % 2)):
                        tokens, seconds, before = 0, 0.0, _read_client_cpu(way, deployment)
                        for index, text in enumerate(self.texts):
                            seed = 1000 * turn + index + 5000
                            ask = self._job if way == OURS else self._samples
                            made, taken = ask(service if way == OURS else server, text, seed)
                            tokens, seconds = tokens + made, seconds + taken
                        if turn >= 0:  # the first warms both up
                            rates[way].append(tokens / seconds)
                            costs[way].append(1000 * (_read_client_cpu(way, deployment) - before) / tokens)
                            self.listener.step(f"best of 16 {way} {turn + 1}")
        self.measured.runs["best of 16"] = rates
        ours, theirs = (statistics.median(rates[way]) for way in (OURS, BARE))
        cost, bare_cost = (statistics.median(costs[way]) for way in (OURS, BARE))
        self.measured.rows += [
            Row("best of 16", "tokens per second", "tokens/s", ours, BARE, theirs, ours / theirs),
            Row("best of 16", "client, CPU for 1,000 tokens", "s", cost, BARE, bare_cost, bare_cost / cost),
        ]

    def _job(self, service: httpx.Client, text: str, seed: int) -> tuple[int, float]:
        spec = self._spec(text, seed, {"name": "self_consistency", "n": _SAMPLES})
        started = time.perf_counter()
        job = service.post("/v1/jobs", json=spec, headers={"Prefer": f"wait={_WAIT_SECONDS}"}).json()
        taken = time.perf_counter() - started
        if job.get("status") != "completed":
            raise BenchError(f"a job did not complete: {job.get('error') or job}")
        return int(job["usage"]["generated"]), taken

    def _samples(self, server: httpx.Client, text: str, seed: int) -> tuple[int, float]:
        body = {"model": self.settings.model_name, "messages": [{"role": "user", "content": text}]}
        prompt = server.post("/tokenize", json=body).raise_for_status().json()["tokens"]
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 256, "n": _SAMPLES, "seed": seed}
        started = time.perf_counter()
        asked = {"model": self.settings.model_name, "prompt": prompt, **sampling}
        answer = server.post("/v1/completions", json=asked).raise_for_status().json()
        return int(answer["usage"]["completion_tokens"]), time.perf_counter() - started

    def _spec(self, text: str, seed: int, strategy: dict[str, Any]) -> dict[str, Any]:
        sampling = {"temperature": 1.0, "max_tokens": 256}
        return {"problem": text, "model": self.settings.model_name, "prompt": "{problem}", "strategy": strategy,
                "budget": {"tokens": 50_000}, "seed": seed, "sampling": sampling}  # fmt: skip

    async def searches(self) -> _Searches:
        """Run beam searches in this process, each followed by its requests alone, and on our engine."""
        found = _Searches()
        own = LocalEngine({name: BUNDLED / name for name in ("policy", "prm")}, EngineOptions(kv_tokens=65_536))
        try:
            for turn in range(-1, self.plan.rounds):
                seconds = bare = 0.0
                for index, text in enumerate(self.texts):
                    seed = 1000 * turn + index + 5000
                    before, scored = (self._metric(url, _COMPUTED) for url in self._urls)
                    traffic, usage, taken = await self._beam(text, seed)
                    after, scored_after = (self._metric(url, _COMPUTED) for url in self._urls)
                    seconds, bare = seconds + taken, bare + await traffic.repeat()
                    if turn >= 0:
                        found.computed += after - before
                        found.scored += scored_after - scored
                        found.ideal += ideal_prompt_tokens(traffic.sequences, self._block)
                        found.usage += usage
                        if turn == 0:
                            found.own += (await _run(self._beam_spec(text, seed), own)).usage
                if turn >= 0:
                    found.seconds.append(seconds)
                    found.bare.append(bare)
                    self.listener.step(f"beam {turn + 1}")
        finally:
            await own.close()
        return found

    def report_searches(self, found: _Searches) -> None:
        """Add the rows of ``beam``, ``reuse`` and ``verifier``."""
        self.measured.runs["beam"] = {OURS: found.seconds, BARE: found.bare}
        ours, bare = statistics.median(found.seconds), statistics.median(found.bare)
        per_token = found.scored / found.usage.generated
        own = found.own.verifier_computed / found.own.generated
        rows = (
            Row("beam", "seconds", "s", ours, BARE, bare, bare / ours),
            Row("reuse", "prompt tokens computed", "tokens", found.computed, IDEAL, found.ideal,
                found.ideal / found.computed),
            Row("verifier", "verifier tokens computed for a generated one", "tokens", per_token, OUR_ENGINE, own,
                own / per_token),
        )  # fmt: skip
        self.measured.rows += [row for row in rows if row.case in self.plan.cases]

    def _beam_spec(self, text: str, seed: int) -> dict[str, Any]:
        verifier = {"kind": "prm", "model": self.settings.prm_name}
        return self._spec(text, seed, {"name": "beam", "n": _SAMPLES}) | {"verifier": verifier}

    async def _beam(self, text: str, seed: int) -> tuple[Traffic, Usage, float]:
        engine = connect(self.settings)
        try:
            await engine.models()  # a worker knows its servers by then
            await engine.clear_cache()
            with recorded() as traffic:
                started = time.perf_counter()
                outcome = await _run(self._beam_spec(text, seed), engine)
                taken = time.perf_counter() - started
        finally:
            await engine.close()
        return traffic, outcome.usage, taken

    @property
    def _urls(self) -> tuple[str, str]:
        """The addresses of the policy and of the verifier."""
        return self.plan.engine, self.settings.prm_url[0] if self.settings.prm_url else self.plan.engine

    @property
    def _block(self) -> int:
        found = re.search(_BLOCK, _read_metrics(self.plan.engine))
        if found is None:
            raise BenchError(f"{self.plan.engine}/metrics does not tell vLLM's block size")
        return int(found[1])

    def _metric(self, url: str, pattern: str) -> float:
        values = re.findall(rf"^{pattern} (\S+)$", _read_metrics(url), re.MULTILINE)
        if not values:
            raise BenchError(f"{url}/metrics has no prompt_tokens_by_source: vLLM 0.32 or later is needed")
        return sum(map(float, values))


def _read_client_cpu(way: str, deployment: Deployment) -> float:
    """Return the seconds of a core used so far by this process, and if it asks the service by that and its broker."""
    if way == BARE:
        return time.process_time()
    service = sum(map(read_cpu_seconds, deployment.pids.values()))
    return time.process_time() + service + deployment.read_broker_load().cpu


def _read_metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", trust_env=False, timeout=10).text


async def _run(spec: dict[str, Any], engine: EngineClient) -> Any:
    outcome = await run_job(resolve_program_job(JobRequest.model_validate(spec)), engine, MemoryJournal())
    if outcome.status != "completed":
        raise BenchError(f"a search did not complete: {outcome.status}")
    return outcome
