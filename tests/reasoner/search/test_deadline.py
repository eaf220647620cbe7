"""``budget.seconds``: a job ends at its deadline, in whichever phase it is, with its best answer so far.

No test measures a duration: work that would never end is cancelled, or the test hangs until its guard fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import reasoner.run
from engine.protocol.types import InvalidRequest, ScoreRequest, ScoreResult
from reasoner.answers import equivalence, json_schema
from reasoner.answers.extraction import finder
from reasoner.answers.extraction.finder import AnswerFinder
from reasoner.answers.spec import AnswerSpec
from reasoner.budget.ledger import GRACE_SECONDS, Ledger
from reasoner.budget.prices import NO_AMOUNT
from reasoner.budget.spec import Budget
from reasoner.deadline import run_within
from reasoner.jobs.journal import MemoryJournal
from reasoner.regex import LastMatch, search_last
from reasoner.run import JobOutcome, run_job
from reasoner.verifiers import rules
from tests.scripted import ANSWER, TEXTS, ScriptedEngine
from tests.specs import build_spec

SECONDS = 0.05
GUARD = 120.0


class Endless:
    """Work that never ends.

    The job's clock stands still until the work is cancelled, and is then far past the deadline.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.begun = 0
        self.ended = 0

    async def work(self, *_: object, **__: object) -> Any:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1
            self.now = 1e6


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Endless:
    endless = Endless()
    monkeypatch.setattr(reasoner.run, "Ledger", partial(Ledger, clock=lambda: endless.now))
    return endless


async def solve(
    strategy: str, engine: ScriptedEngine | None = None, journal: MemoryJournal | None = None, **more: object
) -> JobOutcome:
    spec = {
        "problem": "how?",
        "seed": 4,
        "strategy": {"name": strategy, "n": 16},
        "budget": {"seconds": SECONDS},
        **more,
    }
    async with asyncio.timeout(GUARD):
        return await run_job(build_spec(spec), engine or ScriptedEngine(), journal or MemoryJournal())


async def test_a_job_with_endless_comparisons_ends_and_undecided_answers_count_as_different(
    endless: Endless, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TEXTS, ANSWER, "\\boxed{x+%d}")
    monkeypatch.setattr(equivalence.POOL, "call", endless.work)
    journal = MemoryJournal()
    outcome = await solve("self_consistency", journal=journal)
    assert endless.begun == endless.ended == 1
    assert {vote.answer for vote in outcome.result.votes} == {"x+0", "x+1", "x+2"}
    assert outcome.result.answer is not None
    assert outcome.result.finish_reason == "budget"
    settled = [entry for entry in journal.entries if entry.type == "settled"]
    assert settled
    assert all(entry.data["late"] for entry in settled)

    async def equal(*_: object) -> bool:
        return True

    monkeypatch.setattr(equivalence.POOL, "call", equal)  # a replay makes no comparison
    for entries in (journal.entries, journal.entries[:-1]):
        again = await solve("self_consistency", journal=MemoryJournal(entries))
        assert again.result == outcome.result


async def test_comparisons_that_end_in_time_are_not_reported_late(
    endless: Endless, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TEXTS, ANSWER, "\\boxed{x+%d}")

    async def equal(*_: object) -> bool:
        return True

    monkeypatch.setattr(equivalence.POOL, "call", equal)
    outcome = await solve("self_consistency", deterministic=True)
    assert len(outcome.result.votes) == 1
    assert outcome.result.finish_reason == "answer"


@pytest.mark.parametrize(
    ("verifier", "answer", "place"),
    [
        ({"kind": "python", "tests": ["assert f"]}, "text", (rules, "run_tests")),
        ({"kind": "json_schema", "json_schema": {}}, "text", (json_schema.SCHEMAS, "call")),
        ({"kind": "regex", "pattern": "(a|b)+"}, "text", (rules, "matches_fully")),
        ({"kind": "math", "expected": "y"}, "math", (equivalence.POOL, "call")),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
async def test_an_endless_rule_leaves_the_job_without_scores_and_with_an_answer(
    endless: Endless, monkeypatch: pytest.MonkeyPatch, verifier: dict[str, object], answer: str, place: tuple[Any, str]
) -> None:
    monkeypatch.setitem(TEXTS, ANSWER, "\\boxed{x+%d}")
    monkeypatch.setattr(rules, "check_lockdown", lambda *_: asyncio.sleep(0))
    monkeypatch.setattr(*place, endless.work)
    journal = MemoryJournal()
    outcome = await solve("best_of_n", journal=journal, verifier=verifier, answer=answer)
    assert 1 <= endless.begun == endless.ended <= rules.MAX_CONCURRENT_CHECKS
    assert not any(entry.type == "score" for entry in journal.entries)
    assert outcome.result.answer is not None
    assert outcome.result.confidence is None
    assert outcome.result.finish_reason == "budget"


async def test_scores_computed_in_time_choose_the_answer(endless: Endless, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_CONCURRENT_CHECKS", 1)
    monkeypatch.setattr(rules, "check_lockdown", lambda *_: asyncio.sleep(0))

    async def tested(rule: object, answer: str, *, locked: bool) -> float:
        return float(answer == "1") if answer < "2" else await endless.work()

    monkeypatch.setattr(rules, "_score_by_tests", tested)
    verifier = {"kind": "python", "tests": ["assert f"]}
    outcome = await solve("weighted_vote", verifier=verifier, answer="text")
    assert endless.begun == endless.ended == 1
    assert (outcome.result.answer, outcome.result.finish_reason) == ("1", "budget")


async def test_an_immediate_rule_runs_even_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0] * 200)
    monkeypatch.setattr(reasoner.run, "Ledger", partial(Ledger, clock=lambda: next(times, 1e6)))
    outcome = await solve("best_of_n", verifier={"kind": "exact", "expected": "1"}, answer="text")
    assert outcome.result.confidence in (0.0, 1.0)


class Mute(ScriptedEngine):
    """Engine that never answers a score request."""

    def __init__(self, endless: Endless) -> None:
        super().__init__()
        self._endless = endless

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        scores: list[ScoreResult] = await self._endless.work()
        return scores


@pytest.mark.parametrize("verifier", [{"kind": "prm"}, {"kind": "judge"}], ids=["prm", "judge"])
@pytest.mark.parametrize("tokens", [None, 5000])
async def test_a_model_that_never_scores_leaves_the_job_with_an_answer_and_its_reservation_is_released(
    endless: Endless, verifier: dict[str, object], tokens: int | None
) -> None:
    ledgers: list[Ledger] = []
    with pytest.MonkeyPatch.context() as patch:
        make = vars(reasoner.run)["Ledger"]

        def kept(*args: Any, **options: Any) -> Ledger:
            ledgers.append(make(*args, **options))
            return ledgers[-1]

        patch.setattr(reasoner.run, "Ledger", kept)
        budget = {"seconds": SECONDS, "tokens": tokens}
        outcome = await solve("best_of_n", Mute(endless), verifier=verifier, budget=budget)
    assert endless.begun == endless.ended == 1
    assert outcome.result.answer is not None
    assert outcome.result.finish_reason == "budget"
    assert outcome.usage.verifier_computed == 0
    (ledger,) = ledgers
    assert ledger._reserved == NO_AMOUNT


async def test_a_slow_pattern_yields_no_answer_is_reported_once_and_is_finally_disabled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    async def late(pattern: str, text: str) -> LastMatch | None:
        asked.append(text)
        return None

    monkeypatch.setattr(finder, "search_last", late)
    answers = AnswerFinder(AnswerSpec.model_validate({"extract": {"regex": "(a)"}}))
    with caplog.at_level(logging.WARNING, "reasoner.answers"):
        assert [await answers.find(f"a{index}") for index in range(2 * finder.MAX_LATE)] == [None] * 2 * finder.MAX_LATE
    assert len(asked) == finder.MAX_LATE
    assert len(caplog.records) == 1
    assert "took too long" in caplog.text


async def test_a_pattern_that_never_ends_ends_with_the_job(endless: Endless, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "search_last", endless.work)
    monkeypatch.setattr(finder, "find_pattern_error", lambda _: asyncio.sleep(0, ""))
    outcome = await solve("self_consistency", answer={"compare": "text", "extract": {"regex": "(w)"}})
    assert endless.begun == endless.ended == 1
    assert outcome.result.answer is None
    assert outcome.usage.generated > 0


async def test_an_answer_being_extracted_when_the_attempt_ends_is_extracted_again_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = {"answer": {"compare": "text", "extract": {"regex": r"(w\d)\d* "}}, "budget": {}}
    undisturbed = await solve("self_consistency", **spec)
    found = search_last
    handed_back = asyncio.Event()

    async def never(pattern: str, text: str) -> LastMatch | None:
        handed_back.set()
        await asyncio.Event().wait()
        return None

    monkeypatch.setattr(finder, "search_last", never)
    journal, engine = MemoryJournal(), ScriptedEngine()
    attempt = asyncio.create_task(solve("self_consistency", engine, journal, **spec))
    await handed_back.wait()
    monkeypatch.setattr(finder, "search_last", found)
    attempt.cancel()
    await asyncio.gather(attempt, return_exceptions=True)
    second = ScriptedEngine()
    outcome = await solve("self_consistency", second, journal, **spec)
    assert outcome.result == undisturbed.result
    tokens = [*engine.generated, *second.generated]
    assert len(set(tokens)) == len(tokens) == outcome.usage.generated


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"verifier": {"kind": "regex", "pattern": "a"}}, "verifier.pattern"),
        ({"answer": {"extract": {"regex": "(a)"}}}, "answer.extract.regex"),
    ],
)
async def test_a_pattern_that_cannot_be_compiled_fails_the_job_before_any_token_is_generated(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, object], field: str
) -> None:
    for module in (rules, finder):
        monkeypatch.setattr(module, "find_pattern_error", lambda _: asyncio.sleep(0, "not a regular expression: no"))
    engine = ScriptedEngine()
    with pytest.raises(InvalidRequest, match="not a regular expression: no") as caught:
        await solve("best_of_n", engine, **more)
    assert caught.value.field == field
    assert engine.generated == []


def test_running_work_is_cancelled_a_fixed_grace_period_after_the_deadline() -> None:
    now = [0.0]
    ledger = Ledger(Budget(seconds=2.0), clock=lambda: now[0])
    assert (ledger.seconds_left(), ledger.seconds_until_cut()) == (2.0, 2.0 + GRACE_SECONDS)
    now[0] = 2.0
    assert (ledger.seconds_left(), ledger.seconds_until_cut()) == (0.0, GRACE_SECONDS)
    now[0] = 3.0
    assert (ledger.seconds_left(), ledger.seconds_until_cut()) == (0.0, 0.0)
    assert Ledger(Budget()).seconds_until_cut() is None


async def test_run_within_distinguishes_its_timeout_from_one_of_the_work() -> None:
    async def fails() -> None:
        raise TimeoutError

    begun: list[None] = []
    work: Callable[[], Any] = lambda: begun.append(None)  # noqa: E731
    assert await run_within(0.0, work) is None
    assert begun == []
    assert await run_within(0.01, asyncio.Event().wait) is None
    assert await run_within(None, lambda: asyncio.sleep(0, "done")) == "done"
    with pytest.raises(TimeoutError):
        await run_within(GUARD, fails)
