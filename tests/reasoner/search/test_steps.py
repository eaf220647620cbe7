"""Steps by each rule: they do not depend on how a branch is cut, delayed or resumed, and their lengths are kept."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from pydantic import ValidationError

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineUnavailable, InvalidRequest
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import run_job
from reasoner.search import generation
from tests.long import mostly_long_grid
from tests.reasoner.search.test_stream import tree
from tests.reasoner.search.test_thoughts import CLOSE, Thinker, nodes_of
from tests.specs import build_spec
from tests.vllm.servers import POLICY

RULES: list[dict[str, Any]] = [
    {"by": "separator", "text": "\n\n", "min_tokens": 6},
    {"by": "separator", "text": "\n\n", "max_tokens": 5},
    {"by": "markers", "words": ["\\boxed{0}"]},
    {"by": "tokens", "every": 4},
    {"by": "sentence", "min_tokens": 2, "max_tokens": 9},
    {"by": "markers", "words": ["\\boxed{1}"], "min_tokens": 3},
]
REAL = [
    {"by": "separator", "text": "\n\n", "min_tokens": 15},
    {"by": "markers", "words": ["2", "1"]},
    {"by": "tokens", "every": 7},
    {"by": "separator", "text": " = ", "max_tokens": 9},
]


def spec(rule: dict[str, Any], seed: int, **more: Any) -> JobSpec:
    fields = {"problem": "how?", "seed": seed, "strategy": {"name": "beam", "n": 4}, "deterministic": True}
    return build_spec(fields | {"steps": rule, "verifier": {"kind": "judge", "reads": "all"}} | more)


@pytest.mark.parametrize(("rule", "opens"), mostly_long_grid(RULES, ["prompt", "never"], every=5), ids=str)
async def test_steps_do_not_depend_on_how_a_branch_is_cut_or_resumed(
    rule: dict[str, Any], opens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    for seed in range(8):
        trees = []
        for size in (10_000, 3, 1):
            monkeypatch.setattr(generation, "SEGMENT_TOKENS", size)
            journal = MemoryJournal()
            await run_job(spec(rule, seed), Thinker(seed, opens=opens), journal)
            trees.append(tree(journal))
        assert trees[0] == trees[1] == trees[2]
        monkeypatch.setattr(generation, "SEGMENT_TOKENS", 10_000)
        resumed = MemoryJournal()
        with contextlib.suppress(EngineUnavailable):
            await run_job(spec(rule, seed), Thinker(seed, opens=opens, die_after=7), resumed)
        await run_job(spec(rule, seed), Thinker(seed + 1, opens=opens), resumed)
        assert _texts(resumed) == _texts(journal)
        steps += _count_steps(journal, rule)
    assert steps or rule["by"] in ("sentence", "markers")  # the scripted texts have no sentences, and end at answers


@pytest.mark.parametrize("rule", REAL, ids=str)
async def test_on_the_real_engine_speculation_changes_no_step(rule: dict[str, Any]) -> None:
    question = "Make 27 with + - * / from the numbers 1, 7, 10 and 8, each used exactly once."
    texts = []
    for draft in ("off", "ngram"):
        engine = LocalEngine({"policy": POLICY}, EngineOptions(kv_tokens=8192, draft=draft))
        journal = MemoryJournal()
        try:
            await run_job(spec(rule, 3, problem=question), engine, journal)
        finally:
            await engine.close()
        texts.append(_texts(journal))
        assert _count_steps(journal, rule)
    assert texts[0] == texts[1]


async def test_steps_within_thoughts_that_no_verifier_reads_are_refused() -> None:
    job = spec({"by": "tokens", "every": 5}, 1, verifier={"kind": "judge"})
    with pytest.raises(InvalidRequest, match="the verifier reads answers alone"):
        await run_job(job, Thinker(), MemoryJournal())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"by": "lines"}, "separator"),
        ({"by": "tokens", "every": 0}, "greater than or equal to 1"),
        ({"by": "markers", "words": []}, "at least 1 item"),
        ({"by": "sentence", "min_tokens": 9, "max_tokens": 3}, "min_tokens is 9, above max_tokens: give at most 3"),
    ],
)
def test_an_invalid_rule_is_refused_with_what_would_be_right(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec(rule, 1)


def _texts(journal: MemoryJournal) -> dict[str, tuple[str, str | None]]:
    return {
        name: ("".join(entry.data["text"] for entry in entries), entries[-1].data["reason"])
        for name, entries in nodes_of(journal).items()
    }


def _count_steps(journal: MemoryJournal, rule: dict[str, Any]) -> int:
    """Return the number of steps, whose lengths are checked."""
    limit = min(rule.get("every", 10**9), rule.get("max_tokens", 10**9))
    steps = 0
    for entries in nodes_of(journal).values():
        data = entries[-1].data
        num_tokens = sum(len(entry.data["token_ids"]) for entry in entries)
        text = "".join(entry.data["text"] for entry in entries)
        if data["reason"] == "step" and not text.endswith(CLOSE):
            assert rule.get("min_tokens", 1) <= num_tokens <= limit
            assert rule["by"] != "tokens" or num_tokens == rule["every"]
            steps += 1
    return steps
