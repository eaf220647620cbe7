"""Decisions of the tree searches on branches and scores planned by the test."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasoner.jobs.journal import MemoryJournal
from reasoner.run import JobOutcome, run_job
from reasoner.strategies.tree.mcts import TreeNode, ValueNormalizer
from reasoner.strategies.tree.particle import resample_systematically, to_odds
from reasoner.strategies.tree.rebase import allocate_proportionally
from reasoner.tree import Node
from tests.planned import Path, Planned, PlannedEngine
from tests.specs import build_spec


def step(name: str, score: float = 0.5, probability: float = 0.1) -> Planned:
    return Planned(f"step {name}\n\n", score, probability)


def end(name: str, score: float = 0.5, probability: float = 0.1) -> Planned:
    return Planned(f"so \\boxed{{{name}}}", score, probability)


async def search(
    plan: Mapping[Path, Planned],
    strategy: dict[str, object],
    slow: Mapping[Path, asyncio.Event] | None = None,
    seed: int = 0,
) -> tuple[JobOutcome, list[Path], set[str]]:
    """Return the outcome, the branches in the order of their requests, and the pruned ids."""
    engine, journal = PlannedEngine(plan, slow), MemoryJournal()
    spec = build_spec({"problem": "how?", "seed": seed, "strategy": strategy, "answer": "text"})
    async with asyncio.timeout(30):
        outcome = await run_job(spec, engine, journal)
    pruned = {node for entry in journal.entries if entry.type == "prune" for node in entry.data["nodes"]}
    return outcome, engine.asked, pruned


SUBTREES = {
    (0,): step("a", 0.9),
    (1,): step("b", 0.2),
    (2,): step("c", 0.1),
    (3,): step("d", 0.3),
    (0, 0): end("first", 0.95),
    (3, 0): end("second", 0.2),
    (3, 1): end("third", 0.8),
}


async def test_dvts_follows_the_best_step_of_each_subtree_and_never_compares_subtrees() -> None:
    outcome, asked, pruned = await search(SUBTREES, {"name": "dvts", "n": 4, "expansions": 2})
    # The second subtree continues from d (0.3), though b (0.2) and d are both far below a (0.9) of the first.
    assert set(asked) == set(SUBTREES)
    assert pruned == {"1", "2"}
    assert outcome.result.answer == "first"
    assert outcome.result.confidence == pytest.approx(0.95)


async def test_dvts_samples_siblings_only_if_the_first_score_is_low() -> None:
    _, asked, _ = await search(SUBTREES, {"name": "dvts", "n": 4, "expansions": 2})
    assert (0, 1) not in asked  # 0.95 after 0.9: high enough
    assert (3, 1) in asked  # 0.2 after 0.3


async def test_dvts_gives_the_rest_of_the_width_to_subtrees_that_do_not_divide_n() -> None:
    plan = {(index,): end(str(index), 0.1 * (index + 1)) for index in range(5)}
    outcome, asked, _ = await search(plan, {"name": "dvts", "n": 5, "expansions": 2})
    assert sorted(asked) == [(index,) for index in range(5)]
    assert outcome.result.answer == "4"


async def test_a_slow_subtree_of_dvts_does_not_block_others() -> None:
    """The first step of the first subtree arrives only once the second subtree is complete."""
    released = asyncio.Event()

    class Watching(PlannedEngine):
        async def score(self, request):  # type: ignore[no-untyped-def]
            if "third" in str(request.items):
                released.set()
            return await super().score(request)

    engine = Watching(SUBTREES, {(0,): released})
    spec = build_spec(
        {"problem": "how?", "seed": 0, "strategy": {"name": "dvts", "n": 4, "expansions": 2}, "answer": "text"}
    )
    async with asyncio.timeout(30):
        outcome = await run_job(spec, engine, MemoryJournal())
    assert outcome.result.answer == "first"


async def test_lookahead_keeps_the_step_with_the_best_continuation_not_the_best_score() -> None:
    plan = {
        (0,): step("bait", 0.9),
        (1,): step("plain", 0.5),
        (0, 0): step("cliff", 0.1),
        (1, 0): end("greedy", 0.8),
        (1, 1): end("sampled", 0.85),
    }
    outcome, asked, pruned = await search(plan, {"name": "lookahead", "n": 2, "expansions": 2, "lookahead": 1})
    assert set(asked) == set(plan)
    assert pruned == {"0", "0.0"}
    assert outcome.result.answer == "sampled"


async def test_lookahead_looks_k_steps_ahead() -> None:
    plan = {
        (0,): step("bait", 0.9),
        (1,): step("plain", 0.5),
        (0, 0): step("still good", 0.9),
        (1, 0): step("still poor", 0.4),
        (0, 0, 0): step("cliff", 0.1),
        (1, 0, 0): step("summit", 0.95),
        (1, 1): end("found", 0.9),
    }
    _, _, pruned = await search(plan, {"name": "lookahead", "n": 2, "expansions": 2, "lookahead": 2, "max_steps": 2})
    assert "0" in pruned
    assert "1" not in pruned


async def test_rebase_allocates_its_width_by_the_exponential_of_the_scores_and_finished_ones_vote() -> None:
    # exp(0.5 / T) = 3 for the pair: of the three samples left one goes to 0.3 and two (2.25 rounded) to 0.8.
    plan = {
        (0,): step("high", 0.8),
        (1,): step("low", 0.3),
        (2,): end("done", 0.6),
        (3,): step("none", 0.001),
        (0, 0): end("x", 0.5),
        (0, 1): Planned("thus \\boxed{x}", 0.4),
        (1, 0): end("y", 0.7),
    }
    temperature = 0.5 / math.log(3)
    outcome, asked, pruned = await search(plan, {"name": "rebase", "n": 4, "temperature": temperature})
    assert set(asked) == set(plan)
    assert pruned == {"3"}
    assert outcome.result.answer == "x"  # 0.9 against 0.7 and 0.6
    assert outcome.result.confidence == pytest.approx(0.9 / 2.2)
    assert {vote.answer: vote.count for vote in outcome.result.votes} == {"x": 2, "y": 1, "done": 1}


@given(
    scores=st.lists(st.floats(0, 1), min_size=1, max_size=20),
    width=st.integers(0, 64),
    temperature=st.floats(0.01, 10),
)
def test_proportional_counts_have_the_exact_sum_and_are_rounded_up_or_down(
    scores: list[float], width: int, temperature: float
) -> None:
    counts = allocate_proportionally(scores, width, temperature)
    total = sum(math.exp(score / temperature) for score in scores)
    assert sum(counts) == width
    for score, count in zip(scores, counts, strict=True):
        exact = width * math.exp(score / temperature) / total
        assert math.floor(exact - 1e-6) <= count <= math.ceil(exact + 1e-6)


class Offset(random.Random):
    """Random generator with a fixed value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def random(self) -> float:
        return self._value


@given(weights=st.lists(st.floats(0.001, 100), min_size=1, max_size=12), places=st.integers(1, 32))
def test_systematic_resampling_gives_each_its_expected_count_rounded_up_or_down(
    weights: list[float], places: int
) -> None:
    sums = [0] * len(weights)
    grid = [(index + 0.5) / 500 for index in range(500)]
    for offset in grid:
        counts = resample_systematically(weights, places, Offset(offset))
        assert sum(counts) == places
        for weight, count in zip(weights, counts, strict=True):
            exact = places * weight / sum(weights)
            assert math.floor(exact - 1e-6) <= count <= math.ceil(exact + 1e-6)
        sums = [have + count for have, count in zip(sums, counts, strict=True)]
    for weight, have in zip(weights, sums, strict=True):
        assert have / len(grid) == pytest.approx(places * weight / sum(weights), abs=2 / len(grid))


async def test_a_finished_particle_is_kept_and_a_dead_one_is_replaced_by_a_live_one() -> None:
    plan = {
        (0,): end("done", 0.9),
        (1,): step("live", 0.5),
        (2,): Planned("it just stops", 0.5),
        (3,): step("live too", 0.5),
        **{(parent, index): end(f"{parent}{index}", 0.3) for parent in (1, 3) for index in range(3)},
    }
    outcome, asked, _ = await search(plan, {"name": "particle", "n": 4})
    second = [path for path in asked if len(path) == 2]
    assert len(second) == 3  # four particles, one finished; the dead one is resampled
    assert {path[0] for path in second} == {1, 3}
    assert outcome.result.answer == "done"


async def test_particles_are_resampled_by_their_odds() -> None:
    """Odds of 4 against 1/4: 16 of 17 particles continue the first."""
    plan = {(0,): step("good", 0.8), (1,): step("bad", 0.2), **{(i,): Planned("dead", 0.5) for i in range(2, 17)}}
    plan |= {(parent, index): end(f"{parent}.{index}", 0.3) for parent in (0, 1) for index in range(17)}
    for seed in range(5):
        _, asked, _ = await search(plan, {"name": "particle", "n": 17}, seed=seed)
        counts = [sum(path[0] == first for path in asked if len(path) == 2) for first in (0, 1)]
        assert counts == [16, 1]
    assert to_odds(0.8) / to_odds(0.2) == pytest.approx(16)


def make_node(parent: TreeNode | None, name: str, prior: float, visits: int, value: float) -> TreeNode:
    made = TreeNode(Node((0,), None, (), name), parent, prior, visits, visits * value)
    if parent is not None:
        parent.children[name] = made
    return made


def test_puct_chooses_by_value_plus_prior_as_computed_by_hand() -> None:
    # sqrt(8 + 1) = 3. With c = 1: a: 0.5 + 3 * 0.2 / 5 = 0.62; b: 0.1 + 3 * 0.5 / 5 = 0.4; another sample, worth the
    # average of both if it is new: 0.3 * 0.3 + 3 * 0.3 / 3 = 0.39.
    root = TreeNode(Node((), None, ()), visits=8, samples=2)
    a, b = make_node(root, "a", 0.2, 4, 0.5), make_node(root, "b", 0.5, 4, 0.1)
    assert root.descend(1.0, ValueNormalizer()) is a
    # c = 3: a: 0.5 + 0.36 = 0.86; b: 0.1 + 0.9 = 1; another sample: 0.99.
    assert root.descend(3.0, ValueNormalizer()) is b
    # Both have the value 0 and b has many visits: a: 0.12; b: 0.01; another sample: 0.9.
    a.total, b.total, b.visits, root.samples = 0.0, 0.0, 100, 0
    assert root.descend(1.0, ValueNormalizer()) is root


def test_puct_normalizes_values_to_the_range_seen_so_far() -> None:
    # On [0, 1] the prior decides: 0.02 + 0.3 * 3 * 0.3 / 5 against 0.01 + 0.3 * 3 * 0.7 / 5. On [0.01, 0.02] the value
    # does: 1 + 0.054 against 0 + 0.126.
    root = TreeNode(Node((), None, ()), visits=8, samples=8)
    a, b = make_node(root, "a", 0.3, 4, 0.02), make_node(root, "b", 0.7, 4, 0.01)
    assert root.descend(0.3, ValueNormalizer(0.0, 1.0)) is b
    assert root.descend(0.3, ValueNormalizer(0.01, 0.02)) is a


def test_puct_samples_no_more_if_the_policy_is_certain_and_skips_closed_nodes() -> None:
    root = TreeNode(Node((), None, ()), visits=3, samples=1)
    only = make_node(root, "only", 0.999, 1, 0.0)
    assert root.descend(1.0, ValueNormalizer()) is only
    only.is_exhausted = True
    assert root.descend(1.0, ValueNormalizer()) is None
    assert root.is_exhausted


def test_a_simulation_in_flight_diverts_the_next_one() -> None:
    root = TreeNode(Node((), None, ()), visits=2, samples=2)
    a, b = make_node(root, "a", 0.5, 1, 0.5), make_node(root, "b", 0.5, 1, 0.45)
    assert root.descend(1.0, ValueNormalizer()) is a
    a.add_visits(1)
    assert (a.visits, root.visits) == (2, 3)
    assert root.descend(1.0, ValueNormalizer()) is b


MCTS = {
    (0,): step("poor", 0.13, 0.3),
    (1,): step("poor", 0.13, 0.3),
    (2,): step("rich", 0.9, 0.3),
    (2, 0): end("right", 0.95, 0.999),
    (0, 0): end("wrong", 0.05, 0.999),
    **{(index,): step("poor", 0.13, 0.3) for index in range(3, 20)},
}


async def test_mcts_follows_the_value() -> None:
    outcome, asked, pruned = await search(MCTS, {"name": "mcts", "n": 1, "draws": 4, "in_flight": 1})
    assert asked == [(0,), (1,), (2,), (2, 0)]
    assert pruned == {"1"}  # the twin of (0,)
    assert outcome.result.answer == "right"


async def test_mcts_resolves_small_differences_between_small_values() -> None:
    plan = {(0,): step("better", 0.02, 0.4), (1,): step("likelier", 0.01, 0.6)}
    _, asked, _ = await search(plan, {"name": "mcts", "n": 1, "draws": 3, "in_flight": 1})
    assert asked[:3] == [(0,), (1,), (0, 0)]


async def test_a_duplicate_step_is_no_visit_in_mcts() -> None:
    """A visit would lower the value of "better" below that of another sample at the root, which would come next."""
    plan = {
        (0,): step("better", 0.7, 0.6),
        (1,): step("worse", 0.4, 0.1),
        (0, 0): step("on", 0.8, 0.1),
        (0, 1): step("on", 0.8, 0.1),
        (0, 0, 0): end("there", 0.6, 0.999),
    }
    params = {"name": "mcts", "n": 1, "draws": 5, "in_flight": 1, "exploration": 0.1}
    _, asked, pruned = await search(plan, params)
    assert asked == [(0,), (0, 0), (0, 0, 0), (0, 1), (0, 2)]
    assert "0.1" in pruned


async def test_mcts_samples_no_more_if_a_new_step_is_unlikely() -> None:
    plan = {(0,): step("likely", 0.5, 0.85), (0, 0): end("there", 0.5, 0.85)}
    _, asked, _ = await search(plan, {"name": "mcts", "n": 16, "in_flight": 1})
    assert asked == [(0,), (0, 0)]


async def test_mcts_waits_for_the_first_sample_of_a_step_before_another_one() -> None:
    """Only the first sample shows how likely another one is to be new; at the root several begin at once."""
    released = asyncio.Event()
    plan = {(0,): step("only", 0.9, 0.999), (0, 0): end("there", 0.9, 0.999)}
    plan |= {(index,): plan[(0,)] for index in range(1, 4)}

    class Watching(PlannedEngine):
        async def generate(self, request, *, stream=False):  # type: ignore[no-untyped-def]
            if len(request.prompt) > len("how?"):
                for _ in range(50):  # event loop iterations in which others might begin
                    await asyncio.sleep(0)
                released.set()
            async for item in super().generate(request, stream=stream):
                yield item

    engine = Watching(plan)
    spec = build_spec(
        {"problem": "how?", "seed": 0, "strategy": {"name": "mcts", "n": 16, "in_flight": 4}, "answer": "text"}
    )
    await run_job(spec, engine, MemoryJournal())
    assert released.is_set()
    assert [path for path in engine.asked if len(path) == 2] == [(0, 0)]


async def test_a_beam_samples_siblings_until_a_new_one_is_unlikely() -> None:
    plan = {(0,): step("a", 0.5, 0.6), (1,): step("b", 0.4, 0.3)} | {(i,): step("a", 0.5, 0.6) for i in range(2, 16)}
    _, asked, _ = await search(plan, {"name": "beam", "n": 16, "expansions": 4, "max_steps": 1})
    *steps, finished = asked
    assert steps == [(index,) for index in range(5)]  # the first, then as many as a step has; 0.1 is left
    assert finished == (0, 0)


async def test_a_beam_samples_no_sibling_if_a_new_one_is_unlikely() -> None:
    _, asked, _ = await search({(0,): step("a", 0.5, 0.85)}, {"name": "beam", "n": 4, "expansions": 4, "max_steps": 1})
    assert [path for path in asked if len(path) == 1] == [(0,)]


async def test_a_beam_that_is_not_adaptive_is_that_of_the_paper() -> None:
    """N samples of the first step, the best N / M kept, M samples of each, however certain, high or equal they are."""
    plan = {
        (0,): step("a", 0.6, 0.99),
        (1,): step("a", 0.6, 0.99),
        (2,): step("b", 0.7, 0.5),
        (3,): step("c", 0.1, 0.1),
    }
    plan |= {(2, 0): end("sure", 0.9, 0.99), (2, 1): end("sure", 0.9, 0.99), (0, 0): end("other", 0.2)}
    strategy = {"name": "beam", "n": 4, "expansions": 2, "adaptive": False}
    outcome, asked, pruned = await search(plan, strategy)
    assert sorted(asked) == [(0,), (0, 0), (0, 1), (1,), (2,), (2, 0), (2, 1), (3,)]
    assert {"1", "3"} <= pruned
    assert outcome.result.answer == "sure"
    _, equal, _ = await search(plan | {(2,): step("b", 0.5, 0.5)}, strategy)
    assert {(0, 0), (0, 1), (1, 0), (1, 1)} <= set(equal)  # two equal steps fill the beam
    _, adaptive, _ = await search(plan, strategy | {"adaptive": True})
    assert sorted(path for path in adaptive if len(path) == 1) == [(0,)]


async def test_mcts_ends_when_nothing_is_left_to_expand() -> None:
    plan = {(0,): step("only way", 0.5, 0.9999), (0, 0): end("there", 0.5, 0.9999)}
    outcome, asked, _ = await search(plan, {"name": "mcts", "n": 16, "in_flight": 1})
    assert asked == [(0,), (0, 0)]
    assert outcome.result.finish_reason == "answer"


async def test_mcts_values_a_step_by_a_solution_completed_from_it() -> None:
    plan = {
        (0,): step("bait", 0.9, 0.4),
        (0, 0): end("wrong", 0.05, 0.9),
        (1,): step("plain", 0.1, 0.55),
        (1, 0): end("right", 0.9, 0.9),
        (1, 1): end("right again", 0.9, 0.9999),
    }
    params = {"name": "mcts", "n": 3, "draws": 1, "in_flight": 1, "value": "rollout"}
    outcome, asked, _ = await search(plan, params)
    assert asked == [(0,), (0, 0), (1,), (1, 0), (1, 1)]
    assert outcome.result.answer == "right"


async def test_a_slow_simulation_of_mcts_does_not_block_others() -> None:
    """The first step arrives only once another branch has reached a solution."""
    released = asyncio.Event()

    class Watching(PlannedEngine):
        async def score(self, request):  # type: ignore[no-untyped-def]
            if "right" in str(request.items):
                released.set()
            return await super().score(request)

    engine = Watching(MCTS, {(0,): released})
    spec = build_spec(
        {"problem": "how?", "seed": 0, "strategy": {"name": "mcts", "n": 2, "in_flight": 3}, "answer": "text"}
    )
    async with asyncio.timeout(30):
        outcome = await run_job(spec, engine, MemoryJournal())
    assert outcome.result.answer == "right"


NAMES: Sequence[str] = ("beam", "dvts", "lookahead", "rebase", "mcts", "particle")


@pytest.mark.parametrize("name", NAMES)
async def test_every_tree_search_returns_a_finished_text_when_no_branch_states_an_answer(name: str) -> None:
    plan = {(index,): Planned("nothing", 0.5) for index in range(64)}
    outcome, _, _ = await search(plan, {"name": name, "n": 4})
    assert (outcome.status, outcome.result.finish_reason) == ("completed", "no_answer")
    assert (outcome.result.answer, outcome.result.text) == (None, "nothing")
