"""Contests on an engine from a script: kills at any point, hanging engines, and what their reports say."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.types import Completion, Delta, EngineClient, EngineUnavailable, GenerateRequest
from reasoner.contest import contest as module
from reasoner.contest.contest import Contest, ContestSetting, Outcome, OutcomeFile
from reasoner.contest.file_journal import DamagedJournal, FileJournal
from reasoner.contest.problems import ContestProblem
from reasoner.contest.report import build_report, check_answers, format_report, predict_gain
from reasoner.evaluation.runs import EvaluationMismatch
from reasoner.jobs.journal import Entry
from reasoner.jobs.spec import JobSpec
from reasoner.search import branch_runner
from tests.scripted import ScriptedEngine
from tests.seeds import shift
from tests.specs import build_spec

PROBLEMS = tuple(ContestProblem(f"p{number}", f"What is {number}?", str(number % 3)) for number in range(8))
TOKENS = 3000
ORIGIN = {"command": "reasoner contest", "processor": "CPU", "cores": 2, "commit": "abc"}


class Killed(BaseException):
    """The process ends here."""


def build_problem_spec(problem: ContestProblem, **strategy: Any) -> JobSpec:
    fields = {"name": "weighted_vote", "n": 32} | strategy
    return build_spec({"problem": problem.text, "strategy": fields, "seed": shift(3), "answer": "text", "budget": {}})


def build_setting(folder: Path, seconds: float = 600.0, **more: Any) -> ContestSetting:
    about = {"problems": PROBLEMS, "tokens": TOKENS, "build_spec": build_problem_spec} | more
    return ContestSetting(seconds=seconds, folder=folder, **about)


async def solve(
    setting: ContestSetting,
    engine: EngineClient,
    header: dict[str, Any] | None = None,
    stops_after: float | None = None,
) -> Contest:
    """Run a contest; after ``stops_after`` seconds it is cancelled, as by Ctrl-C."""
    with OutcomeFile({"contest": "test"} if header is None else header, setting.folder) as file:
        contest = Contest(setting, engine, file, lambda _: None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(stops_after):
                await contest.run()
    return contest


def read_journals(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "journals").rglob("*.jsonl")}


def read_csv(folder: Path) -> list[list[str]]:
    with (folder / "answers.csv").open(newline="") as file:
        return list(csv.reader(file))


async def test_a_contest_spends_its_tokens_and_answers_every_problem(tmp_path: Path) -> None:
    contest = await solve(build_setting(tmp_path), ScriptedEngine())
    assert TOKENS * 0.9 <= contest.tokens <= TOKENS
    assert sum(outcome.tokens for outcome in contest.outcomes.values()) == contest.tokens
    assert [row[0] for row in read_csv(tmp_path)] == ["id", *(problem.id for problem in PROBLEMS)]
    assert all(row[1] for row in read_csv(tmp_path))
    told = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert all(each["is_final"] for each in told)


@pytest.mark.parametrize("seed", range(20))
async def test_kills_at_any_point_lose_nothing_and_never_spend_more(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(shift(seed))
    append, left = FileJournal.append, [0]

    async def append_or_die(self: FileJournal, entries: Sequence[Entry]) -> None:
        left[0] -= 1
        if left[0] == 0 and rng.random() < 0.5:  # in the middle of the line
            await append(self, entries)
            with self._path.open("r+b") as file:
                file.truncate(self._path.stat().st_size - rng.randint(1, 20))
        if left[0] <= 0:
            raise Killed
        await append(self, entries)

    monkeypatch.setattr(FileJournal, "append", append_or_die)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # a killed process reports no lost tasks
    setting, before, ended = build_setting(tmp_path), dict[str, bytes](), dict[str, Outcome]()
    for attempt in range(5):
        left[0] = rng.randint(1, 60) if attempt < 4 else 10**9
        with contextlib.suppress(Killed):
            await solve(setting, ScriptedEngine(order=seed + attempt))
        after = read_journals(tmp_path)
        for name, content in before.items():
            whole = content[: content.rfind(b"\n") + 1]
            assert after[name].startswith(whole)
        with OutcomeFile({"contest": "test"}, tmp_path) as file:
            now = {outcome.id: outcome for outcome in file.items}
        assert {id: now[id] for id in ended} == ended
        before, ended = after, now
    assert ended.keys() == {problem.id for problem in PROBLEMS}
    assert sum(outcome.tokens for outcome in ended.values()) <= TOKENS
    assert all(row[1] for row in read_csv(tmp_path))


class HangingEngine(ScriptedEngine):
    """Answers some requests and then none."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.left = answers

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        self.left -= 1
        if self.left < 0:
            await asyncio.Event().wait()
        async for answer in super().generate(request, stream=stream):
            yield answer


async def test_an_engine_that_hangs_does_not_keep_answers_past_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branch_runner, "ABORT_TIMEOUT_SECONDS", 0.1)
    contest = await solve(build_setting(tmp_path, seconds=1.5), HangingEngine(6))
    assert contest.outcomes.keys() == {problem.id for problem in PROBLEMS}
    assert "time" in {outcome.reason for outcome in contest.outcomes.values()}
    assert len(read_csv(tmp_path)) == 1 + len(PROBLEMS)
    assert any(row[1] for row in read_csv(tmp_path)[1:])


async def test_the_time_of_earlier_attempts_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branch_runner, "ABORT_TIMEOUT_SECONDS", 0.1)
    first = await solve(build_setting(tmp_path), HangingEngine(0), stops_after=0.2)
    assert not first.outcomes
    (clock,) = (tmp_path / "journals").rglob("clock.json")
    clock.write_text('{"seconds": 600.0}')
    contest = await solve(build_setting(tmp_path), ScriptedEngine())
    assert contest.tokens == 0
    assert {outcome.reason for outcome in contest.outcomes.values()} == {"time"}


async def test_an_engine_that_was_away_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class AwayOnce(ScriptedEngine):
        calls = 0

        async def generate(
            self, request: GenerateRequest, *, stream: bool = False
        ) -> AsyncIterator[Completion | Delta]:
            self.calls += 1
            if self.calls == 3:
                raise EngineUnavailable("away")
            async for answer in super().generate(request, stream=stream):
                yield answer

    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    contest = await solve(build_setting(tmp_path), AwayOnce())
    assert not any(outcome.is_failed for outcome in contest.outcomes.values())
    assert all(outcome.answer for outcome in contest.outcomes.values())


async def test_a_problem_that_cannot_run_says_why_and_leaves_its_tokens_to_others(tmp_path: Path) -> None:
    long = ContestProblem("long", "x" * 2000)
    contest = await solve(build_setting(tmp_path, problems=(long, *PROBLEMS)), ScriptedEngine())
    assert contest.outcomes["long"].is_failed
    assert contest.outcomes["long"].tokens == 0
    assert contest.tokens >= TOKENS * 0.9
    assert ["long", ""] in read_csv(tmp_path)


async def test_a_folder_of_another_contest_is_refused_and_left_alone(tmp_path: Path) -> None:
    await solve(build_setting(tmp_path), ScriptedEngine(), {"tokens": 3000})
    before = read_csv(tmp_path)
    with pytest.raises(EvaluationMismatch, match="tokens is 3000 there and 4000 here"):
        await solve(build_setting(tmp_path), ScriptedEngine(), {"tokens": 4000})
    assert read_csv(tmp_path) == before


async def test_a_contest_that_is_begun_anew_finds_nothing_of_the_one_before(tmp_path: Path) -> None:
    await solve(build_setting(tmp_path), ScriptedEngine(), {"tokens": 3000})
    (tmp_path / OutcomeFile.name).unlink()
    contest = await solve(build_setting(tmp_path, tokens=800), ScriptedEngine(), {"tokens": 800})
    assert 0 < contest.tokens <= 800


async def test_a_damaged_journal_is_refused_by_its_line(tmp_path: Path) -> None:
    await solve(build_setting(tmp_path), ScriptedEngine())
    path = next((tmp_path / "journals").rglob("*.jsonl"))
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(DamagedJournal, match="line 1: no entries"):
        FileJournal(path, "job")


def outcome(id: str, answer: str | None, **more: Any) -> Outcome:
    about: dict[str, Any] = {"confidence": 0.5, "reason": "answer", "samples": 4, "tokens": 100, "verifier_tokens": 0}
    about |= {"seconds": 1.0, "wrong": 0.4, "chance": 0.25, "sample_tokens": 25}
    return Outcome(id=id, answer=answer, **about | more)


async def test_the_report_counts_the_right_answers_of_problems_that_have_one() -> None:
    problems = [ContestProblem("a", "x", "1/2"), ContestProblem("b", "y", "07"), ContestProblem("c", "z")]
    outcomes = {each.id: each for each in (outcome("a", "0.5"), outcome("b", "8"), outcome("c", "9"))}
    right = await check_answers(problems, outcomes, None, None)
    assert right == {"a": True, "b": False}
    outcomes["b"] = outcome("b", "7")
    assert (await check_answers(problems, outcomes, 999, None))["b"]
    head = {"file": "p.csv", "num_problems": 3, "tokens": 900, "hours": 1.0, "model": "m", "strategy": {"name": "auto"}}
    document = build_report(head | {"origin": ORIGIN}, problems, outcomes, {"a": True, "b": False}, 600.0)
    assert document["accuracy"]["right"] == 1
    assert document["another_hour"]["tokens"] == 1800
    page = format_report(document)
    assert "Right: 1 of 2 (50%" in page
    assert "| b | 7 | no: 07 | 0.50 | 4 | 100 | 1.0 | 0.100 | answer |" in page


def test_more_tokens_buy_more_but_never_more_than_what_is_wrong() -> None:
    outcomes = [outcome("a", "1"), outcome("b", "2", wrong=0.1), outcome("c", None, is_failed=True)]
    first = predict_gain(outcomes, 25)
    assert first == pytest.approx(0.4 * 0.25)
    assert first < predict_gain(outcomes, 1000) < predict_gain(outcomes, 100_000) < 0.4 + 0.1
    assert predict_gain(outcomes, 24) == 0.0
