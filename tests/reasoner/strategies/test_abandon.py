"""Solutions that are given up early: which, what is saved, and that one is always left."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.protocol.types import Branch, Capability
from reasoner.admission.policy_checks import list_needs
from reasoner.admission.refusal import JobRefused
from reasoner.jobs.journal import Entry, MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from tests.reasoner.crashes import check_budget_and_replay
from tests.scripted import ANSWER, EOS, ScriptedEngine
from tests.specs import build_spec

VERIFIERS: dict[str, dict[str, Any]] = {"graded": {"kind": "graded"}, "prm": {"kind": "prm", "model": "prm"}}


class LongSolutions(ScriptedEngine):
    """An engine whose solutions end after about fifty tokens."""

    def __init__(self, **more: Any) -> None:
        super().__init__(context=3000, **more)

    def token(self, branch: Branch, position: int, temperature: float) -> int:
        token = super().token(branch, position, temperature)
        return 40 if token in (EOS, ANSWER) and position % 6 else token


def job(
    name: str = "best_of_n", verifier: str = "graded", tokens: int | None = None, seed: int = 1, **abandon: float
) -> JobSpec:
    strategy = {"name": name, "n": 8, "abandon": {"every": 16} | abandon}
    return build_spec(
        {
            "problem": "how?",
            "model": "policy",
            "seed": seed,
            "strategy": strategy,
            "budget": {"tokens": tokens},
            "verifier": VERIFIERS[verifier],
        }
    )


async def run(spec: JobSpec, engine: ScriptedEngine | None = None) -> tuple[JobOutcome, list[Entry]]:
    journal = MemoryJournal()
    outcome = await run_job(spec, engine or LongSolutions(), journal)
    return outcome, journal.entries


def read_tree(entries: list[Entry]) -> tuple[dict[str, dict[str, Any]], dict[str, float], set[str]]:
    """Return the nodes, their scores, and the pruned ones."""
    nodes = {entry.data["node"]: entry.data for entry in entries if entry.type == "node"}
    scores = {entry.data["node"]: entry.data["score"] for entry in entries if entry.type == "score"}
    pruned = {node for entry in entries if entry.type == "prune" for node in entry.data["nodes"]}
    return nodes, scores, pruned


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", ["best_of_n", "weighted_vote"])
async def test_exactly_the_unfinished_solutions_below_the_score_are_given_up(name: str, verifier: str) -> None:
    outcome, entries = await run(job(name, verifier, below=0.5, seed=3))
    nodes, scores, pruned = read_tree(entries)
    steps = {node for node in nodes if nodes[node]["reason"] == "step"}
    answered = {node for node, data in nodes.items() if data["answer"] is not None}
    assert answered
    assert pruned
    assert pruned == {node for node in steps if scores[node] < 0.5}
    assert outcome.usage.pruned == sum(nodes[node]["tokens"] for node in pruned)
    [decision] = [entry for entry in entries if "saved" in entry.data]
    assert decision.data["nodes"] == sorted(pruned)
    assert decision.spend.saved == outcome.usage.saved == decision.data["saved"]


async def test_a_fraction_of_the_best_is_of_the_best_solution_that_has_ended() -> None:
    _, entries = await run(job(verifier="prm", of_best=0.9, seed=2))
    nodes, scores, pruned = read_tree(entries)
    best, expected = 0.0, set()
    for entry in entries:
        if entry.type != "score" or entry.data["score"] is None:
            continue
        node = entry.data["node"]
        if nodes[node]["reason"] != "step":
            best = max(best, entry.data["score"])
        elif entry.data["score"] < 0.9 * best:
            expected.add(node)
    assert expected
    assert expected <= pruned
    assert all(scores[node] < 0.9 * best for node in pruned)


async def test_saved_tokens_are_those_up_to_the_mean_length_of_the_others() -> None:
    outcome, entries = await run(job(below=0.5, seed=3))
    nodes, _, pruned = read_tree(entries)

    def count(node: str) -> int:
        parts = node.split(".")
        return sum(nodes[".".join(parts[:end])]["tokens"] for end in range(1, len(parts) + 1))

    whole = [count(node) for node, data in nodes.items() if data["reason"] in ("answer", "stop")]
    mean = sum(whole) / len(whole)
    assert outcome.usage.saved == round(sum(max(0.0, mean - count(node)) for node in pruned))


async def test_the_last_solution_is_not_given_up_without_an_answer() -> None:
    outcome, entries = await run(job(below=1.0))
    nodes, _, pruned = read_tree(entries)
    assert pruned
    assert outcome.status == "completed"
    assert any(data["answer"] is not None for data in nodes.values())


async def test_without_it_solutions_are_the_same_as_ever() -> None:
    plain = build_spec(
        {"problem": "how?", "seed": 1, "strategy": {"name": "best_of_n", "n": 8}, "verifier": None}
        | {"verifier": {"kind": "graded"}}
    )
    outcome, entries = await run(plain)
    assert outcome.usage.saved == outcome.usage.pruned == 0
    assert not any("." in node for node in read_tree(entries)[0])


def test_it_needs_a_server_that_continues_and_a_verifier_of_steps() -> None:
    assert Capability.CONTINUATION in {need.capability for need in list_needs(job(below=0.5))}
    with pytest.raises(JobRefused, match="needs a verifier of single steps, and 'exact' scores finished solutions"):
        build_spec(
            {
                "problem": "?",
                "strategy": {"name": "best_of_n", "abandon": {"below": 0.5}},
                "verifier": {"kind": "exact", "expected": "7"},
            }
        )
    with pytest.raises((JobRefused, ValidationError), match="give 'below', a score, or 'of_best'"):
        build_spec({"problem": "?", "strategy": {"name": "best_of_n", "abandon": {}}, "verifier": {"kind": "graded"}})


@given(
    name=st.sampled_from(["best_of_n", "weighted_vote"]),
    verifier=st.sampled_from(sorted(VERIFIERS)),
    seed=st.integers(0, 1000),
    tokens=st.integers(1, 4000),
    below=st.floats(0, 1),
    die_after=st.integers(0, 60),
)
async def test_the_budget_is_kept_and_a_resumed_job_replays_what_was_given_up(
    name: str, verifier: str, seed: int, tokens: int, below: float, die_after: int
) -> None:
    spec = job(name, verifier, tokens, seed, below=below)
    await check_budget_and_replay(spec, LongSolutions, order=seed, die_after=die_after)
