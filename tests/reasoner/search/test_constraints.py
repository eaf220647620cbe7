"""Searches under a constraint, on the real engine: answers are of the language, thoughts are free."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jsonschema
import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from reasoner.admission.refusal import JobRefused
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import JobOutcome, run_job
from reasoner.strategies.base import Feature
from reasoner.strategies.registry import STRATEGIES
from reasoner.tree import read_parts
from tests.long import mostly_long
from tests.reasoner.search.test_thoughts import nodes_of
from tests.reasoner.search.test_thoughts_on_engine import PLAIN, POLICY
from tests.specs import build_spec
from tests.strategies import COMPARING, SCORING, WRITING

QUESTION = "Make 68 with + - * / from the numbers 10, 12, 8 and 3, each used exactly once."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "steps": {"enum": [1, 2, 3]}},
    "required": ["sum", "steps"],
    "additionalProperties": False,
}
MODELS = {"policy": POLICY.parent / "policy", "thinker": POLICY, "prm": POLICY.parent / "prm"}
HELD = [name for name in WRITING if Feature.CONSTRAINT in STRATEGIES[name].supports and name not in COMPARING]


@asynccontextmanager
async def serving(options: EngineOptions = PLAIN) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(MODELS, options)
    try:
        yield engine
    finally:
        await engine.close()


async def solve(engine: LocalEngine, journal: MemoryJournal | None = None, **fields: Any) -> JobOutcome:
    common = {"problem": QUESTION, "seed": 5, "model": "policy", "constraint": {"json_schema": SCHEMA}}
    common |= {"verifier": {"kind": "prm", "model": "prm"}, "budget": {"tokens": 3000}}
    return await run_job(build_spec(common | fields), engine, journal or MemoryJournal())


@pytest.mark.parametrize("strategy", mostly_long(HELD, every=4))
async def test_every_strategy_answers_in_the_language(strategy: str) -> None:
    needs = strategy in SCORING
    more = {} if needs else {"verifier": None}
    async with serving() as engine:
        outcome = await solve(engine, strategy={"name": strategy}, steps={"by": "tokens", "every": 3}, **more)
    assert outcome.result.answer is not None
    jsonschema.validate(json.loads(outcome.result.answer), SCHEMA)
    assert outcome.result.text == outcome.result.answer


async def test_thoughts_are_free_and_answers_are_held_with_and_without_speculation() -> None:
    texts = []
    for options in (PLAIN, EngineOptions(kv_tokens=16_384, draft="ngram"), EngineOptions(kv_tokens=1024, page_size=16)):
        journal = MemoryJournal()
        async with serving(options) as engine:
            outcome = await solve(
                engine,
                journal,
                model="thinker",
                verifier=None,
                strategy={"name": "self_consistency", "n": 6},
                sampling={"thinking_tokens": 40},
                deterministic=True,
            )
        ends = {name: entries[-1].data for name, entries in nodes_of(journal).items()}
        assert len(ends) == 6
        for name, end in ends.items():
            jsonschema.validate(json.loads(end["answer"]), SCHEMA)
            whole = "".join(entry.data["text"] for entry in nodes_of(journal)[name])
            thought = sum(part.num_chars for part in read_parts(end) if part.kind == "thought")
            assert "</think>" in whole[:thought]
            assert re.search(r"\d+ [-+*/] \d+", whole[:thought])  # no text of the schema
        texts.append(outcome.result.text)
    assert texts[0] == texts[1] == texts[2]


async def test_equal_json_values_vote_together() -> None:
    async with serving() as engine:
        outcome = await solve(
            engine,
            constraint={"regex": r'\{"a": (1|1\.0|1e0)\}|\{ "a":2 \}'},
            answer={"compare": "json", "extract": "all"},
            verifier=None,
            strategy={"name": "self_consistency", "n": 12},
            sampling={"temperature": 3.0},
        )
    assert len(outcome.result.votes) == 2
    assert sum(vote.count for vote in outcome.result.votes) == 12


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "x"+ "y"'}, "x+y"),
    ],
)
async def test_other_languages(constraint: dict[str, Any], pattern: str) -> None:
    async with serving() as engine:
        outcome = await solve(engine, constraint=constraint, strategy={"name": "best_of_n", "n": 4})
    assert re.fullmatch(pattern, outcome.result.answer or "")


async def test_a_solution_that_a_limit_cuts_has_no_answer() -> None:
    async with serving() as engine:
        outcome = await solve(
            engine,
            constraint={"regex": "[a-c]{30}"},
            strategy={"name": "best_of_n", "n": 4},
            sampling={"max_tokens": 9},
        )
    assert outcome.result.answer is None


async def test_a_crash_in_the_middle_changes_nothing() -> None:
    fields: dict[str, Any] = {
        "strategy": {"name": "beam", "n": 4},
        "steps": {"by": "tokens", "every": 3},
        "deterministic": True,
    }
    async with serving() as engine:
        journal = MemoryJournal()
        whole = await solve(engine, journal, **fields)
        entries = await journal.load()
        for cut in range(1, len(entries), 3):
            batch = entries[cut - 1].data["batch"]
            kept = [entry for entry in entries if entry.data["batch"] <= batch]
            again = MemoryJournal()
            await again.append(kept)
            outcome = await solve(engine, again, **fields)
            assert outcome.result == whole.result


@pytest.mark.parametrize("strategy", sorted(set(WRITING) - set(HELD) - {"tournament"}))
async def test_strategies_that_add_text_are_refused(strategy: str) -> None:
    async with serving() as engine:
        with pytest.raises(JobRefused, match="which no constraint can hold"):
            await solve(engine, strategy={"name": strategy}, verifier=None)
