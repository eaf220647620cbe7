"""Answers extracted by a client's pattern, in a worker process and within the job's time."""

from __future__ import annotations

import pytest

from reasoner import regex
from reasoner.answers.extraction.extract import extract_answer
from reasoner.answers.extraction.finder import AnswerFinder
from reasoner.answers.extraction.phrases import ExtractionStopped
from reasoner.answers.spec import AnswerSpec
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import run_job
from reasoner.subprocess_pool import keep_workers_alive
from tests.scripted import ScriptedEngine
from tests.specs import build_spec


def spec(extract: object = "auto", compare: str = "math") -> AnswerSpec:
    return AnswerSpec.model_validate({"compare": compare, "extract": extract})


async def find(text: str, pattern: str, ended: ExtractionStopped = "end") -> str | None:
    found = await AnswerFinder(spec({"regex": pattern})).find(text, ended)
    assert found is None or found.level == "strict"
    return found and found.text


async def test_pattern_yields_the_group_of_its_last_match() -> None:
    with keep_workers_alive():
        assert await find("<a>1</a><a>2</a>", "<a>(.*?)</a>") == "2"
        assert await find("<think><a> 1 </a><a>2</a>", "<a>(.*?)</a>") is None
        assert await find("<think><a>2</a></think><a> 1 </a>", "<a>(.*?)</a>") == "1"
        assert await find("no", "<a>(.*?)</a>") is None
        assert await find("yes", "yes|(no)") is None
        assert await find("a=1", r"a=(\d+)", "inside") is None
        assert await find("a=1 ", r"a=(\d+)", "inside") == "1"
        assert await find("a=" + "1" * 64_001, r"a=(\d+)") is None


async def test_catastrophic_backtracking_finds_nothing_and_the_next_search_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(regex, "CPU_SECONDS", 0.1)
    with keep_workers_alive():
        assert await find("x" * 5000, "(x+x+)+y") is None  # exponential: would not end
        assert await find("x" * 5000, "(x)") == "x"


def test_pattern_is_never_matched_in_this_process() -> None:
    with pytest.raises(ValueError, match="worker process"):
        extract_answer("a", spec({"regex": "(a)"}))


async def test_job_extracts_as_its_spec_says() -> None:
    body = {"problem": "?", "strategy": {"name": "self_consistency", "n": 8}, "seed": 2}
    outcome = await run_job(
        build_spec(body | {"answer": {"compare": "text", "extract": {"regex": r"(w\d)\d* "}}}),
        ScriptedEngine(),
        MemoryJournal(),
    )
    assert outcome.result.answer is not None
    assert outcome.result.answer.startswith("w")
    hashes = build_spec(body | {"answer": {"extract": "hash"}})
    assert (await run_job(hashes, ScriptedEngine(), MemoryJournal())).result.finish_reason == "no_answer"
