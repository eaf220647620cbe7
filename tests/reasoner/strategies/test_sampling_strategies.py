"""Strategies on whole solutions: budgets, replays and crashes, for every parameter that changes decisions."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.types import EngineUnavailable, InvalidRequest, ModelInfo, TokenizeRequest
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from reasoner.strategies.sampling.deepconf import count_missing_votes
from reasoner.tree import make_branch_key
from tests.reasoner.search.test_stream import Delayed, tree
from tests.scripted import ScriptedEngine
from tests.specs import build_spec

PROMPT = "{{ problem }}{% for solution in solutions %}{{ solution }}{% endfor %}"
"""Template of merged solutions that fits into the engine's small context, for some of them."""
VARIANTS: list[dict[str, Any]] = [
    {"name": "self_consistency", "n": 12, "stop": "beta"},
    {"name": "self_consistency", "n": 12, "stop": "beta", "threshold": 0.8, "ahead": 3},
    {"name": "self_consistency", "n": 12, "stop": "window", "window": 2},
    {"name": "revise", "n": 7, "chains": 2, "memory": 2, "request": "Again?"},
    {"name": "revise", "n": 6, "by": "verifier", "request": "Again?"},
    {"name": "budget_forcing", "n": 3, "thinking": 20, "extensions": 2, "marker": "w40 ", "answer": 9},
    {"name": "budget_forcing", "n": 2, "extensions": 1},
    {"name": "budget_forcing", "thinking": 0},
    {"name": "aggregate", "n": 4, "k": 2, "rounds": 2, "template": PROMPT},
    {"name": "aggregate", "n": 3, "k": 1, "rounds": 1, "by": "verifier", "template": PROMPT},
    {"name": "synthesize", "n": 3, "template": PROMPT},
    {"name": "synthesize", "n": 2, "mode": "select", "template": PROMPT},
    {"name": "deepconf", "n": 12, "keep": 50, "window": 8, "measure": "tail"},
    {"name": "deepconf", "n": 16, "mode": "online", "keep": 40, "window": 8, "warmup": 5, "consensus": 0.7, "top": 3},
]
STRATEGIES = st.sampled_from(VARIANTS)
BUDGETS = st.one_of(st.none(), st.integers(1, 1500))


def spec(strategy: dict[str, Any], seed: int, tokens: int | None = None, **more: object) -> JobSpec:
    base = {"problem": "how?", "seed": seed, "strategy": strategy, "budget": {"tokens": tokens}, "answer": "text"}
    return build_spec(base | more)


async def solve(
    strategy: dict[str, Any], seed: int, engine: ScriptedEngine | None = None, **more: Any
) -> tuple[JobOutcome, MemoryJournal]:
    journal = MemoryJournal()
    outcome = await run_job(spec(strategy, seed, **more), engine or Delayed(seed), journal)
    return outcome, journal


def told(journal: MemoryJournal) -> dict[str, dict[str, Any]]:
    """Return each node's journal entries with its segments joined."""
    nodes: dict[str, dict[str, Any]] = {}
    for entry in journal.entries:
        if entry.type == "node":
            data = entry.data
            known = nodes.setdefault(data["node"], {"text": "", "tokens": 0, "confidence": []})
            parts = {"text": known["text"] + data["text"], "tokens": known["tokens"] + data["tokens"]}
            nodes[data["node"]] = dict(data) | parts | {"confidence": known["confidence"] + data.get("confidence", [])}
    return nodes


@given(strategy=STRATEGIES, seed=st.integers(0, 1000), tokens=st.integers(1, 1500))
async def test_the_budget_is_kept_to_the_token(strategy: dict[str, Any], seed: int, tokens: int) -> None:
    engine = Delayed(seed)
    outcome = await run_job(spec(strategy, seed, tokens), engine, MemoryJournal())
    assert engine.most <= tokens
    assert engine.total == outcome.usage.total <= tokens
    assert engine.outstanding == 0


@given(strategy=STRATEGIES, seed=st.integers(0, 1000), tokens=BUDGETS, kept=st.floats(0, 1))
async def test_a_replay_decides_the_same_and_sends_no_request(
    strategy: dict[str, Any], seed: int, tokens: int | None, kept: float
) -> None:
    job, journal, idle = spec(strategy, seed, tokens), MemoryJournal(), ScriptedEngine()
    first = await run_job(job, Delayed(seed), journal)
    again = await run_job(job, idle, MemoryJournal(journal.entries))
    assert (again.result, again.usage) == (first.result, first.usage)
    assert idle.total == 0
    prefix = journal.entries[: int(kept * len(journal.entries))]
    resumed = MemoryJournal(prefix)
    await run_job(job, Delayed(seed + 1), resumed)
    assert resumed.entries[: len(prefix)] == prefix


@given(strategy=STRATEGIES, seed=st.integers(0, 1000), tokens=BUDGETS, die_after=st.integers(0, 40))
async def test_a_crashed_job_pays_no_token_twice_and_every_branch_ends_with_a_reason(
    strategy: dict[str, Any], seed: int, tokens: int | None, die_after: int
) -> None:
    job, journal = spec(strategy, seed, tokens), MemoryJournal()
    dying, fresh = Delayed(seed, die_after=die_after), Delayed(seed + 1)
    with contextlib.suppress(EngineUnavailable):
        await run_job(job, dying, journal)
    outcome = await run_job(job, fresh, journal)
    assert outcome.usage.generated == len(dying.generated) + len(fresh.generated)
    begun = [entry.data["node"] for entry in journal.entries if entry.type == "node"]
    ended = [entry.data["node"] for entry in journal.entries if entry.type == "node" and entry.data["final"]]
    assert set(begun) == set(ended)
    assert len(set(ended)) == len(ended)


@given(
    strategy=STRATEGIES, seed=st.integers(0, 1000), tokens=BUDGETS, one=st.integers(0, 999), other=st.integers(0, 999)
)
async def test_a_deterministic_job_searches_the_same_tree_for_any_delays(
    strategy: dict[str, Any], seed: int, tokens: int | None, one: int, other: int
) -> None:
    job = spec(strategy, seed, tokens, deterministic=True)
    first, second = MemoryJournal(), MemoryJournal()
    results = [await run_job(job, Delayed(delays), journal) for delays, journal in ((one, first), (other, second))]
    assert results[0].result == results[1].result
    assert tree(first) == tree(second)


@pytest.mark.parametrize("limit", [1, 7, 30])
@pytest.mark.parametrize("strategy", VARIANTS)
async def test_max_tokens_bounds_the_generated_tokens_of_a_solution(strategy: dict[str, Any], limit: int) -> None:
    _, journal = await solve(strategy, 4, sampling={"max_tokens": limit})
    for node in solutions(journal):
        assert sum(entry["tokens"] for entry in node) <= limit


def solutions(journal: MemoryJournal) -> list[list[dict[str, Any]]]:
    """Return the entries of every node and its ancestors, from the start of its conversation."""
    by_id = told(journal)
    found = []
    for node in by_id.values():
        above = [node]
        while above[0]["parent"] and not above[0].get("fresh"):
            above.insert(0, by_id[above[0]["parent"]])
        found.append(above)
    return found


# Self-consistency.


@pytest.mark.parametrize("rule", [{"stop": "beta", "threshold": 0.7}, {"stop": "window", "window": 2}])
async def test_a_vote_that_stops_early_has_the_first_samples_of_the_plain_one_and_wastes_none(
    rule: dict[str, Any],
) -> None:
    saved = 0
    for seed in range(16):
        plain, pool = await solve({"name": "self_consistency", "n": 16}, seed)
        early, journal = await solve({"name": "self_consistency", "n": 16} | rule, seed)
        every, heard = told(pool), told(journal)
        first = {str(number): every[str(number)]["text"] for number in range(len(heard))}
        assert {name: node["text"] for name, node in heard.items()} == first
        assert all(node["reason"] != "cancelled" for node in heard.values())
        saved += plain.usage.generated - early.usage.generated
    assert saved > 16 * 50


async def test_samples_started_ahead_are_cancelled_and_paid_for_when_the_vote_ends() -> None:
    rule = {"name": "self_consistency", "n": 16, "stop": "window", "window": 2}
    cancelled = 0
    for seed in range(20):
        exact, _ = await solve(rule, seed)
        early, journal = await solve(rule | {"ahead": 8}, seed)
        nodes = {entry.data["node"]: entry.data for entry in journal.entries if entry.type == "node"}
        cancelled += sum(node["reason"] == "cancelled" for node in nodes.values())
        assert early.usage.generated == sum(node["tokens"] for node in nodes.values())
        assert early.usage.generated >= exact.usage.generated
        windows = [(nodes[str(at)], nodes[str(at + 1)]) for at in range(0, len(nodes) - 1, 2)]
        over = [one["answer"] == other["answer"] is not None for one, other in windows]
        assert any(over) or len(nodes) == 16
    assert cancelled > 0


# Revision.


@pytest.mark.parametrize("seed", range(8))
async def test_every_attempt_reads_the_latest_ones_of_its_chain_and_all_of_them_vote(seed: int) -> None:
    engine = ScriptedEngine(context=4000, order=seed)
    strategy = {"name": "revise", "n": 7, "chains": 2, "memory": 2, "request": "Again?"}
    outcome, journal = await solve(strategy, seed, engine)
    nodes = told(journal)
    attempts = {node: data for node, data in nodes.items() if data["reason"] != "said"}
    prompts = {request.prompt for request in engine.requests}
    lengths = []
    for chain in ("0", "1"):
        texts = [data["text"] for node, data in attempts.items() if node.split(".")[0] == chain]
        lengths.append(len(texts))
        for seen in range(1, len(texts)):
            shown = [part for text in texts[max(0, seen - 2) : seen] if text.strip() for part in (text, "Again?")]
            assert await engine.tokenize(TokenizeRequest("policy", "how?" + "".join(shown))) in prompts
    assert lengths == [4, 3]
    counts = Counter(data["answer"] for data in attempts.values() if data["answer"] is not None)
    assert counts[outcome.result.answer] == max(counts.values(), default=0)
    assert sum(vote.count for vote in outcome.result.votes) == sum(counts.values())


async def test_a_conversation_beyond_the_context_drops_its_oldest_attempts_and_finally_all() -> None:
    shown = Counter[int]()
    for seed in range(24):
        engine = ScriptedEngine(context=420 if seed % 2 else 160)
        _, journal = await solve({"name": "revise", "n": 5, "chains": 1, "request": "Again?"}, seed, engine)
        assert len([data for data in told(journal).values() if data["reason"] != "said"]) == 5
        again = await engine.tokenize(TokenizeRequest("policy", "Again?"))
        for prompt in [request.prompt for request in engine.requests]:
            assert len(prompt) < 420
            shown[sum(prompt[at : at + len(again)] == again for at in range(len(prompt)))] += 1
    assert shown[0] > 24  # more than the first attempts
    assert min(shown[1], shown[2]) > 0


@pytest.mark.parametrize("seed", range(6))
async def test_a_verifier_chooses_among_all_attempts_and_scores_each_without_its_predecessors(seed: int) -> None:
    engine = ScriptedEngine(context=4000)
    outcome, journal = await solve({"name": "revise", "n": 6, "by": "verifier", "request": "Again?"}, seed, engine)
    scores = {entry.data["node"]: entry.data["score"] for entry in journal.entries if entry.type == "score"}
    assert outcome.result.node == max(scores, key=lambda node: scores[node], default=None)
    nodes = told(journal)
    for entry in journal.entries:
        if entry.type == "score":
            text = nodes[entry.data["node"]]["text"]
            assert len(entry.data["scores"]) <= text.count("\n\n") + 1


async def test_choosing_by_a_verifier_without_one_is_refused_with_the_valid_choice() -> None:
    class Alone(ScriptedEngine):
        async def models(self) -> list[ModelInfo]:
            return (await super().models())[:1]

    with pytest.raises(InvalidRequest, match="there is no verifier to choose"):
        await solve({"name": "revise", "by": "verifier"}, 1, Alone())
    outcome, _ = await solve({"name": "revise", "n": 4}, 1, Alone())
    assert outcome.usage.generated > 0


# Budget forcing.


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("seed", range(12))
async def test_thinking_is_extended_then_ended_at_its_cap_and_the_answer_requested(seed: int, thinks: bool) -> None:
    engine = ScriptedEngine(order=seed, thinks=thinks)
    strategy = {"name": "budget_forcing", "n": 4, "thinking": 24, "extensions": 2, "answer": 20}
    _, journal = await solve(strategy, seed, engine)
    nodes = told(journal)
    marker = "</think>" if thinks else ""
    final = marker + "\n\nFinal answer: \\boxed{"
    for chain in map(str, range(4)):
        line = [data for node, data in nodes.items() if node.split(".")[0] == chain]
        thinking, waits = 0, 0
        for at, data in enumerate(line[:-1]):
            following = line[at + 1]
            assert following["parent"] == data["node"]
            if data["reason"] == "said":
                continue
            thinking += data["tokens"]
            marked = thinks and data["text"].endswith(marker)
            if (marked or data["reason"] == "stop") and waits < 2 and thinking < 24:
                assert (following["reason"], following["text"]) == ("said", "Wait")
                assert following["undone"] == (len(marker) if marked else 0)
                waits += 1
            elif marked:
                assert following["reason"] != "said"  # the model writes its answer by itself
            else:
                assert (following["reason"], following["text"]) == ("said", final)
                assert thinking == 24 or (data["reason"] == "stop" and data["answer"] is None)
        assert thinking <= 24
        last = line[-1]
        if line[-2:-1] and line[-2]["text"] == final:
            assert last["tokens"] <= 20
        elif not (len(line) > 1 and thinks and line[-2]["text"].endswith(marker)):
            assert last["reason"] == "stop"
            assert last["answer"] is not None


async def test_a_prompt_with_the_end_of_thinking_marker_does_not_end_the_thinking() -> None:
    for seed in range(6):
        engine = ScriptedEngine(thinks=True)
        _, journal = await solve({"name": "budget_forcing", "extensions": 3}, seed, engine)
        waits = [data for data in told(journal).values() if data["text"] == "Wait"]
        wait = await engine.tokenize(TokenizeRequest("policy", "Wait"))
        said = [request.prompt for request in engine.requests if request.prompt[-len(wait) :] == wait]
        assert len(waits) > 0
        assert all(not {0, 3} & set(prompt) for prompt in said)


async def test_a_requested_answer_ends_its_branch_soon_after_it_is_stated() -> None:
    strategy = {"name": "budget_forcing", "n": 4, "thinking": 0, "answer": 60}
    ends = [node for seed in range(8) for node in told((await solve(strategy, seed))[1]).values() if node["tokens"]]
    stated = [node for node in ends if node["reason"] == "answer"]
    assert stated
    assert all(node["tokens"] in (16, 32, 48) and "}" in node["text"] for node in stated)
    assert all("}" not in node["text"] for node in ends if node["reason"] == "length")


async def test_a_binding_budget_still_ends_with_a_requested_answer() -> None:
    for tokens in (60, 150):
        engine = ScriptedEngine(loops=4, context=5000)  # branches that loop never end by themselves
        strategy = {"name": "budget_forcing", "n": 3, "answer": 10}
        outcome, journal = await solve(strategy, 1, engine, tokens=tokens)
        nodes = told(journal)
        looping = [name for name in ("0", "1", "2") if make_branch_key((int(name),)) % 2]
        assert looping
        for name in looping:
            assert (nodes[name]["reason"], nodes[name]["tokens"]) == ("length", tokens // 3 - 10)
            assert nodes[f"{name}.0"]["text"].endswith("\\boxed{")
            assert nodes[f"{name}.0.0"]["tokens"] == 10
        assert outcome.usage.generated <= tokens


# Confidence.


@pytest.mark.parametrize("measure", ["bottom", "tail", "lowest", "mean"])
@pytest.mark.parametrize("seed", range(6))
async def test_the_most_confident_solutions_vote_with_their_confidence(seed: int, measure: str) -> None:
    strategy = {"name": "deepconf", "n": 16, "keep": 50, "window": 6, "measure": measure}
    outcome, journal = await solve(strategy, seed)
    heights: dict[str, float] = {}
    for name, data in told(journal).items():
        values = np.array(data["confidence"])
        windows = np.convolve(values, np.ones(6) / 6, "valid") if len(values) >= 6 else values.mean(keepdims=True)
        lowest = np.sort(windows)[: max(1, len(windows) // 10)]
        by = {"bottom": lowest.mean(), "tail": windows[-1], "lowest": windows.min(), "mean": values.mean()}
        if data["answer"] is not None:
            heights[name] = float(by[measure])
    bar = np.percentile(list(heights.values()), 50)
    weights: dict[str, float] = defaultdict(float)
    for name, height in heights.items():
        if height >= bar - 1e-12:
            weights[told(journal)[name]["answer"]] += height
    assert outcome.result.answer == max(weights, key=lambda answer: weights[answer])
    assert {vote.answer: vote.weight for vote in outcome.result.votes} == pytest.approx(dict(weights))


@pytest.mark.parametrize("seed", range(12))
async def test_online_a_low_window_ends_a_solution_and_consensus_ends_the_vote(seed: int) -> None:
    strategy = {"name": "deepconf", "n": 24, "mode": "online", "keep": 60, "window": 4, "warmup": 8, "consensus": 0.8}
    outcome, journal = await solve(strategy, seed)
    nodes = told(journal)

    def windows(values: list[float]) -> list[float]:
        size = min(4, len(values))
        return [sum(values[at : at + size]) / size for at in range(len(values) - size + 1)]

    warm = [nodes[str(number)] for number in range(8)]
    assert all(node["reason"] != "pruned" for node in warm)
    bar = np.percentile([min(windows(node["confidence"])) for node in warm if node["answer"] is not None], 40)
    weights: dict[str, float] = defaultdict(float)
    for name, node in nodes.items():
        values = node["confidence"]
        looks = [at for at in range(8, len(values) + 1, 8) if min(windows(values[:at])) < bar]
        if node["reason"] == "pruned":
            assert int(name) >= 8
            assert looks == [len(values)]
        elif int(name) >= 8 and node["reason"] != "cancelled":
            assert not [at for at in looks if at < len(values)]
        if node["answer"] is not None and node["reason"] != "pruned" and min(windows(values)) >= bar - 1e-12:
            weights[node["answer"]] += min(windows(values))
    assert {vote.answer: vote.weight for vote in outcome.result.votes} == pytest.approx(dict(weights))
    assert len(nodes) == 24 or max(weights.values()) >= 0.8 * sum(weights.values())
    assert outcome.usage.pruned == sum(node["tokens"] for node in nodes.values() if node["reason"] == "pruned")


def test_the_missing_votes_are_those_that_the_leader_needs_for_the_consensus() -> None:
    assert count_missing_votes([], 0.9) == 1
    assert count_missing_votes([[1.0, 1.0]], 0.9) == 0
    assert count_missing_votes([[1.0] * 8, [1.0]], 0.9) == 1  # 9 of 10
    assert count_missing_votes([[1.0] * 8, [2.0]], 0.9) == 5  # 18 of 20: five more of weight 2
    assert count_missing_votes([[1.0], [1.0]], 0.75) == 2
    assert count_missing_votes([[1.0], [1.0]], 1.0) > 10**9
