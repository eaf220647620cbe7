"""A contest: every problem is a search with a journal in a file, and all share one pool of tokens and one time.

The time is that for which the command works: a contest that was killed goes on with what was left. At its end searches
stop with the best that they have, and whatever hangs is cut off.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter

from engine.protocol.types import EngineClient, EngineError, EngineUnavailable
from reasoner.admission.refusal import JobRefused
from reasoner.answers.canonical import canonicalize
from reasoner.best_so_far import choose_best_so_far
from reasoner.budget.allocator import MAX_TRUST, JobProgress, estimate_prospect
from reasoner.budget.prices import Prices
from reasoner.confidence.calibration import Calibration
from reasoner.contest.answers import Answer, choose_answer, write_answers
from reasoner.contest.file_journal import FileJournal, name_journal
from reasoner.contest.problems import ContestProblem
from reasoner.contest.token_pool import TokenPool
from reasoner.evaluation.runs import ItemFile
from reasoner.jobs.job import JobResult
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.view import JobView, fold_events
from reasoner.run import run_job
from reasoner.subprocess_pool import keep_workers_alive

log = logging.getLogger(__name__)

TICK_SECONDS = 2.0
"""Time between two looks at the searches that go on."""
RETRY_SECONDS = 3.0
"""Time after which an engine that was away is asked again."""
MARGIN = 0.02
"""Part of the time that is kept for the last answers, at most ``MAX_MARGIN_SECONDS``."""
MAX_MARGIN_SECONDS = 10.0
CLOCK_FILE = "clock.json"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a problem's search."""

    id: str
    answer: str | None
    """The answer that is handed in; ``None`` if there is none of the form that is asked for."""
    confidence: float | None
    reason: str
    """Why it ended: ``answer``, ``no_answer``, ``budget``, ``time``, or the fault for which it cannot run."""
    samples: int
    tokens: int
    verifier_tokens: int
    seconds: float
    wrong: float
    """Probability that the leading answer is wrong, as the allocator estimates it."""
    chance: float
    """Probability that one more solution is right then."""
    sample_tokens: int
    """Tokens of such a solution."""
    is_failed: bool = False


class OutcomeFile(ItemFile[Outcome]):
    """The outcomes of a contest, one a line below a header that says which contest it is."""

    name = "contest.jsonl"
    adapter: ClassVar[TypeAdapter[Any]] = TypeAdapter(Outcome)


@dataclass(frozen=True, slots=True)
class ContestSetting:
    """The problems and the limits that they share."""

    problems: tuple[ContestProblem, ...]
    tokens: int
    seconds: float
    """Working time over all attempts."""
    build_spec: Callable[[ContestProblem], JobSpec]
    folder: Path
    modulo: int | None = None
    """Answers are whole numbers, which are handed in modulo this; ``None`` for any."""
    calibration: Calibration | None = None
    prices: Mapping[str, Prices] = field(default_factory=dict)


class Contest:
    """One attempt at a contest."""

    def __init__(
        self, setting: ContestSetting, engine: EngineClient, file: OutcomeFile, on_change: Callable[[Contest], None]
    ) -> None:
        """``file``: the outcomes of earlier attempts, which is open. Raises ``DamagedJournal``."""
        self.setting = setting
        self.outcomes = {outcome.id: outcome for outcome in file.items}
        self.answers: dict[str, Answer] = {}
        self._engine, self._file, self._on_change = engine, file, on_change
        # A contest with other settings, whose file of outcomes took the place of this one, has journals of its own.
        settings = json.dumps(file.header, sort_keys=True).encode()
        name = blake2b(settings, digest_size=8).hexdigest()
        self._folder = setting.folder / "journals" / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self.journals = {
            problem.id: FileJournal(self._folder / name_journal(problem.id), f"{name}-{problem.id}")
            for problem in setting.problems
        }
        taken = {id: journal.granted for id, journal in self.journals.items()}
        taken |= {id: outcome.tokens for id, outcome in self.outcomes.items()}
        self.pool = TokenPool(setting.tokens, len(setting.problems), taken)
        self._earlier = _read_clock(self._folder)
        self._started = time.monotonic()
        self._seen: dict[str, int] = {}
        self._specs = {problem.id: setting.build_spec(problem) for problem in setting.problems}

    @property
    def elapsed(self) -> float:
        """Seconds of work, those of earlier attempts included."""
        return self._earlier + time.monotonic() - self._started

    @property
    def tokens(self) -> int:
        """Tokens spent so far."""
        return sum(journal.usage.total for journal in self.journals.values())

    async def run(self) -> None:
        """Solve what is not solved yet. Raises nothing for a problem that cannot run; its outcome says why.

        When it is cancelled, answers are written once more, and the same call in a new process goes on.
        """
        left = self.setting.seconds - self.elapsed
        margin = min(MAX_MARGIN_SECONDS, MARGIN * self.setting.seconds)
        ends_at = time.time() + left - margin
        loop = asyncio.get_running_loop()
        closing = loop.call_later(max(0.0, left - margin), self.pool.close)
        try:
            with keep_workers_alive():
                tasks = {
                    asyncio.create_task(self._solve(problem, ends_at)): problem
                    for problem in self.setting.problems
                    if problem.id not in self.outcomes
                }
                await self._watch(tasks, loop.time() + left - margin / 2)
        finally:
            closing.cancel()
            self._look()

    async def _watch(self, tasks: Mapping[asyncio.Task[None], ContestProblem], until: float) -> None:
        """Look at the searches now and then until all have ended, and cut off those that the time does not stop."""
        loop, running = asyncio.get_running_loop(), set(tasks)
        try:
            while running and (left := until - loop.time()) > 0:
                timeout = min(TICK_SECONDS, left)
                done, running = await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                self._look()
            for task in running:  # before they are cancelled: what hangs may take its time to end
                problem = tasks[task]
                result = choose_best_so_far(self._specs[problem.id], self.journals[problem.id].entries)
                self._end(problem, result, "time")
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _solve(self, problem: ContestProblem, ends_at: float) -> None:
        setting, journal = self.setting, self.journals[problem.id]
        spec = self._specs[problem.id].model_copy(update={"deadline": ends_at})
        journal.grant_source = self.pool.open_share(problem.id)
        while True:
            try:
                ended = await run_job(
                    spec, self._engine, journal, prices=setting.prices, calibration=setting.calibration
                )
            except EngineUnavailable as error:
                log.warning("the engine is away, and is asked again in %g s: %s", RETRY_SECONDS, error)
                await asyncio.sleep(RETRY_SECONDS)
            except (EngineError, JobRefused) as error:
                self._end(problem, None, str(error), is_failed=True)
                return
            else:
                is_late = ended.result.finish_reason == "budget" and time.time() >= ends_at
                self._end(problem, ended.result, "time" if is_late else ended.result.finish_reason)
                return

    def _end(self, problem: ContestProblem, result: JobResult | None, reason: str, *, is_failed: bool = False) -> None:
        """Write the outcome of a problem, and give back what its search did not need. Only the first one counts."""
        if problem.id in self.outcomes:
            return
        journal = self.journals[problem.id]
        usage = journal.usage
        progress = _read_progress(fold_events(journal.entries), self._specs[problem.id], usage.total)
        prospect = estimate_prospect(progress.samples, progress.trust)
        outcome = Outcome(
            id=problem.id,
            answer=choose_answer(result, self.setting.modulo),
            confidence=None if result is None else result.confidence,
            reason=reason,
            samples=len(progress.samples),
            tokens=usage.total,
            verifier_tokens=usage.verifier_computed,
            seconds=usage.seconds,
            wrong=prospect.wrong,
            chance=prospect.chance,
            sample_tokens=progress.next_request().tokens,
            is_failed=is_failed,
        )
        self._file.add(outcome)
        self.outcomes[problem.id] = outcome
        self.pool.end(problem.id, usage.total)
        self._look()

    def _look(self) -> None:
        """Write what is known now: the answers of ended searches and the best so far of the others, and the clock."""
        for problem in self.setting.problems:
            outcome, journal = self.outcomes.get(problem.id), self.journals[problem.id]
            if outcome is not None:
                self.answers[problem.id] = Answer(problem.id, outcome.answer, outcome.confidence, is_final=True)
            elif self._seen.get(problem.id) != len(journal.entries):
                self._seen[problem.id] = len(journal.entries)
                result = choose_best_so_far(self._specs[problem.id], journal.entries)
                confidence = None if result is None else result.confidence
                chosen = choose_answer(result, self.setting.modulo)
                self.answers[problem.id] = Answer(problem.id, chosen, confidence, is_final=False)
        write_answers(self.setting.folder, self.answers.values(), self.setting.modulo)
        clock = self._folder / CLOCK_FILE
        partial = clock.with_suffix(".partial")
        partial.write_text(json.dumps({"seconds": self.elapsed}))
        partial.replace(clock)
        self._on_change(self)


def _read_progress(view: JobView, spec: JobSpec, spent: int) -> JobProgress:
    """Return the solutions that have ended, as the allocator sees them."""
    ended = [
        node
        for node in view.nodes.values()
        if node.parent is not None and not node.children and node.reason not in (None, "pruned")
    ]
    samples = [(None if node.answer is None else canonicalize(node.answer), node.score) for node in ended]
    return JobProgress(samples, spent, 1.0 if spec.has_conclusive_verifier else MAX_TRUST)


def _read_clock(folder: Path) -> float:
    """Return the seconds of earlier attempts."""
    path = folder / CLOCK_FILE
    return float(json.loads(path.read_text())["seconds"]) if path.exists() else 0.0
