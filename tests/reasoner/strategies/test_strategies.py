"""Decisions of each strategy, checked on the resulting tree."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from reasoner.jobs.candidate_spec import MAX_N
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import JobOutcome, run_job
from reasoner.strategies.registry import STRATEGIES, describe_strategies, parse_params
from tests.scripted import ScriptedEngine
from tests.specs import build_spec

SEEDS = range(12)


async def solve(strategy: dict[str, object], seed: int) -> tuple[JobOutcome, dict[str, dict[str, object]], set[str]]:
    """Return the outcome, the final nodes by id, and the pruned ids."""
    journal = MemoryJournal()
    spec = build_spec({"problem": "how?", "strategy": strategy, "seed": seed, "answer": "text"})
    outcome = await run_job(spec, ScriptedEngine(order=seed), journal)
    nodes: dict[str, dict[str, object]] = {}
    pruned: set[str] = set()
    for entry in journal.entries:
        if entry.type == "node":
            nodes[entry.data["node"]] = dict(entry.data)
        elif entry.type == "score":
            nodes[entry.data["node"]]["score"] = entry.data["score"]
        elif entry.type == "prune":
            pruned.update(entry.data["nodes"])
    return outcome, nodes, pruned


@pytest.mark.parametrize("seed", SEEDS)
async def test_self_consistency_answers_with_the_most_frequent_answer(seed: int) -> None:
    outcome, nodes, _ = await solve({"name": "self_consistency", "n": 16}, seed)
    counts = Counter(node["answer"] for node in nodes.values() if node["answer"] is not None)
    assert counts[outcome.result.answer] == max(counts.values())
    assert outcome.result.confidence == pytest.approx(max(counts.values()) / 16)
    assert outcome.result.abstained == 16 - sum(counts.values())


@pytest.mark.parametrize("seed", SEEDS)
async def test_best_of_n_answers_with_the_highest_scored_candidate(seed: int) -> None:
    outcome, nodes, _ = await solve({"name": "best_of_n", "n": 16}, seed)
    scores = {node: data["score"] for node, data in nodes.items() if data["answer"] is not None and "score" in data}
    assert outcome.result.node == max(scores, key=lambda node: scores[node])


@pytest.mark.parametrize("seed", SEEDS)
async def test_weighted_vote_answers_with_the_largest_sum_of_scores(seed: int) -> None:
    outcome, nodes, _ = await solve({"name": "weighted_vote", "n": 16}, seed)
    weights: dict[object, float] = defaultdict(float)
    for data in nodes.values():
        if data["answer"] is not None:
            weights[data["answer"]] += float(data.get("score", 0.0))  # type: ignore[arg-type]
    assert weights[outcome.result.answer] == pytest.approx(max(weights.values()))


@pytest.mark.parametrize("seed", SEEDS)
async def test_beam_expands_only_the_best_scored_of_each_level_and_prunes_the_rest(seed: int) -> None:
    outcome, nodes, pruned = await solve({"name": "beam", "n": 8, "expansions": 4}, seed)
    levels: dict[int, list[str]] = defaultdict(list)
    for node in nodes:
        levels[node.count(".")].append(node)
    expanded = {data["parent"] for data in nodes.values()} - {""}
    assert not expanded & pruned
    for level in levels.values():
        chosen = [node for node in level if node in expanded]
        assert len(chosen) <= 2
        rivals = {nodes[node]["text"]: nodes[node].get("score", -1.0) for node in level if node in pruned}
        for node in chosen:
            others = [score for text, score in rivals.items() if text != nodes[node]["text"]]
            assert all(nodes[node]["score"] >= score for score in others)  # type: ignore[operator]
    if outcome.result.node is not None:
        assert outcome.result.node not in pruned


async def test_greedy_is_one_branch_independent_of_the_seed() -> None:
    texts = set()
    for seed in SEEDS:
        _, nodes, _ = await solve({"name": "greedy"}, seed)
        texts.add(tuple(str(node["text"]) for node in nodes.values()))
    assert len(texts) == 1


async def test_another_seed_samples_other_solutions() -> None:
    _, first, _ = await solve({"name": "self_consistency", "n": 4}, 1)
    _, second, _ = await solve({"name": "self_consistency", "n": 4}, 2)
    assert [node["text"] for node in first.values()] != [node["text"] for node in second.values()]


def test_unknown_strategies_and_parameters_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown strategy 'mtcs'; known are greedy, .*beam"):
        parse_params("mtcs", {})
    with pytest.raises(ValueError, match=r"width: Extra inputs.*its parameters: n, expansions, max_steps"):
        parse_params("beam", {"width": 3})
    with pytest.raises(ValueError, match=rf"n: Input should be less than or equal to {MAX_N}"):
        parse_params("beam", {"n": MAX_N + 1})


def test_every_strategy_has_a_summary_and_described_parameters() -> None:
    for name, schema in describe_strategies().items():
        assert schema["summary"]
        assert schema["needs_verifier"] == STRATEGIES[name].needs_verifier
        assert all("description" in field for field in schema["parameters"].get("properties", {}).values())
