"""Early exit and first finished: what is probed, when a thought or the job ends, and who votes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest

from reasoner.jobs.journal import MemoryJournal
from reasoner.run import JobOutcome, run_job
from reasoner.strategies.registry import parse_params
from tests.scripted import ScriptedEngine
from tests.specs import build_spec

FINAL = "\n</think>\n\nFinal answer: \\boxed{"


async def solve(strategy: dict[str, Any], seed: int, **more: Any) -> tuple[JobOutcome, dict[str, dict[str, Any]]]:
    """Run a job on a model that thinks; return its outcome and its nodes, whose parts are joined."""
    journal = MemoryJournal()
    job = build_spec({"problem": "how?", "seed": seed, "strategy": strategy, "deterministic": True} | more)
    outcome = await run_job(job, ScriptedEngine(order=seed, thinks=True), journal)
    nodes: dict[str, dict[str, Any]] = {}
    for entry in journal.entries:
        if entry.type == "node":
            text = nodes.get(entry.data["node"], {}).get("text", "")
            nodes[entry.data["node"]] = entry.data | {"text": text + entry.data["text"]}
    return outcome, nodes


def chains(nodes: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the nodes of each chain in the order in which they came."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, data in nodes.items():
        found[name.split(".")[0]].append(data)
    return found


@pytest.mark.parametrize("seed", range(16))
async def test_a_thought_is_probed_at_intervals_and_ends_when_its_last_probes_agree(seed: int) -> None:
    strategy = {"name": "early_exit", "n": 4, "every": 8, "window": 2, "answer": 20}
    _, nodes = await solve(strategy, seed)
    for chain in chains(nodes).values():
        probes: list[str | None] = []
        thought = ""
        for at, data in enumerate(chain):
            following = chain[at + 1] if at + 1 < len(chain) else None
            if data["text"] == FINAL:
                assert (data["parent"], data["reason"]) == (thought, "said")
            elif at and chain[at - 1]["text"] == FINAL:
                probes.append(data["answer"])
                agree = len(probes) >= 2 and probes[-1] is not None and probes[-1] == probes[-2]
                assert data["tokens"] <= 20
                assert not agree or following is None
                assert following is None or following["parent"] == thought  # the thought goes on, not the probe
            elif data["parts"] and data["parts"][-1][0] == "thought" and data["reason"] == "length":
                assert data["tokens"] == 8
                thought = data["node"]
                assert following is None or following["text"] == FINAL


async def test_an_answer_behind_a_thought_that_its_limit_closed_votes_only_if_there_is_no_other() -> None:
    mixed = 0
    for seed in range(32):
        strategy = {"name": "early_exit", "n": 12, "every": 8, "window": 16, "threshold": 1.0}
        outcome, nodes = await solve(strategy, seed, budget={"thinking_tokens": 24})
        own = forced = 0
        for chain in chains(nodes).values():
            thoughts = [data for data in chain if data["text"] != FINAL]
            is_forced = any(part[:2] == ["thought", "injected"] for data in thoughts for part in data["parts"])
            is_probe = len(chain) > 1 and chain[-2]["text"] == FINAL  # the job ended before its thought did
            answers = not is_probe and chain[-1].get("answer_level") == "strict"
            own, forced = own + (answers and not is_forced), forced + (answers and is_forced)
        assert sum(vote.count for vote in outcome.result.votes) == (own or forced)
        mixed += bool(own and forced)
    assert mixed > 3


async def test_probes_do_not_change_the_thought_that_they_interrupt() -> None:
    for seed in range(6):
        _, often = await solve({"name": "early_exit", "n": 1, "every": 8, "window": 16}, seed)
        thoughts = [
            data for data in often.values() if data["parts"] and data["parts"][0][:2] == ["thought", "generated"]
        ]
        for earlier, later in itertools.pairwise(thoughts):
            assert later["parent"] == earlier["node"]
        assert sum(data["tokens"] for data in thoughts) == thoughts[-1]["thought"]["tokens"]


async def test_the_job_ends_when_the_branches_that_have_ended_decide_the_vote() -> None:
    stopped = 0
    for seed in range(12):
        outcome, _ = await solve({"name": "early_exit", "n": 16, "every": 8, "threshold": 0.6}, seed)
        full, _ = await solve({"name": "early_exit", "n": 16, "every": 8, "threshold": 1.0}, seed)
        assert outcome.usage.generated <= full.usage.generated
        stopped += outcome.usage.generated < full.usage.generated
        if outcome.result.votes:
            assert outcome.result.answer == outcome.result.votes[0].answer
    assert stopped > 0  # few, since most of these texts state no answer, and who is silent counts


@pytest.mark.parametrize("seed", range(8))
async def test_the_first_that_finish_vote_and_equal_votes_go_to_the_shortest(seed: int) -> None:
    outcome, nodes = await solve({"name": "first_finished", "n": 12, "first": 3}, seed)
    finished = sorted(
        (data["tokens"], name, data["answer"]) for name, data in nodes.items() if data["answer_level"] == "strict"
    )
    assert sum(vote.count for vote in outcome.result.votes) == min(3, len(finished))
    top = max(vote.weight for vote in outcome.result.votes)
    leading = {vote.answer for vote in outcome.result.votes if vote.weight == top}
    assert outcome.result.answer == next(answer for _, _, answer in finished[:3] if answer in leading)


async def test_solutions_in_flight_are_cancelled_when_enough_have_finished() -> None:
    job = {"problem": "how?", "seed": 4, "strategy": {"name": "first_finished", "n": 16, "first": 2}}
    journal = MemoryJournal()
    outcome = await run_job(build_spec(job), ScriptedEngine(order=1, thinks=True), journal)
    everything = await run_job(
        build_spec(job | {"strategy": {"name": "self_consistency", "n": 16}}),
        ScriptedEngine(order=1, thinks=True),
        MemoryJournal(),
    )
    assert sum(vote.count for vote in outcome.result.votes) == 2
    assert outcome.usage.generated < everything.usage.generated


def test_more_voters_than_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="3 solutions cannot finish of 2: give at most n"):
        parse_params("first_finished", {"n": 2})
