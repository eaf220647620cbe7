"""A stream: work added while iterating, branches left in flight, and trees independent of delays."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.types import Completion, Delta, EngineUnavailable, GenerateRequest
from reasoner.answers.equivalence import Equivalence
from reasoner.budget.ledger import Ledger
from reasoner.budget.prices import Amount
from reasoner.jobs.journal import Entry, JobCancelled, MemoryJournal
from reasoner.run import run_job
from reasoner.search.context import SearchContext
from reasoner.search.policies.policy import Policy, tokenize_problem
from reasoner.search.prefix_pin import PrefixPin
from reasoner.search.search import Search
from reasoner.tree import Node
from tests.scripted import ScriptedEngine
from tests.seeds import shift
from tests.specs import build_spec
from tests.strategies import WRITING


class Delayed(ScriptedEngine):
    """Engine that delays every branch by a random number of event loop iterations, independently of its siblings."""

    def __init__(self, delays: int, **more: int) -> None:
        super().__init__(**more)
        self._delays = random.Random(shift(delays))

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        for _ in range(self._delays.randrange(30)):
            await asyncio.sleep(0)
        async for item in super().generate(request, stream=stream):
            for _ in range(self._delays.randrange(8)):
                await asyncio.sleep(0)
            yield item


async def search_with(
    engine: ScriptedEngine,
    journal: MemoryJournal,
    strategy: Callable[[Search], Awaitable[None]],
    **more: object,
) -> Search:
    spec = build_spec({"problem": "how?", "seed": 3} | more)
    policy = (await engine.models())[0]
    async with PrefixPin(engine, "job") as pin_key:
        ledger = Ledger(spec.budget, {}, from_shared_pool=journal.grant_source is not None)
        policies = (Policy(policy, spec.sampling.fill(policy.sampling)),)
        context = SearchContext(spec, engine, policies, pin_key, journal, ledger, Equivalence(), asyncio.Event())
        search = await Search.begin(context, await tokenize_problem(spec, engine, policy))
        try:
            await strategy(search)
        finally:
            await search.close()
    return search


def shape(root: Node) -> list[tuple[object, ...]]:
    """Return the content of a tree in the order of paths."""
    nodes = sorted(root.walk(), key=lambda node: node.path)
    return [(node.path, node.text, node.reason, node.answer, node.score) for node in nodes]


async def chase(search: Search) -> None:
    """Expand every step twice as soon as it arrives, to depth three, and leave after nine nodes."""
    async with search.stream() as stream:
        stream.expand([search.root], 4)
        seen = 0
        async for nodes in stream:
            for node in nodes:
                if node.open and len(node.path) < 3:
                    stream.expand([node], 2)
            seen += len(nodes)
            if seen >= 9:
                break


async def test_work_added_while_iterating_arrives_in_the_same_stream() -> None:
    async def strategy(search: Search) -> None:
        async with search.stream() as stream:
            stream.expand([search.root], 3)
            async for nodes in stream:
                stream.complete([node for node in nodes if node.reason == "step"], 1)

    search = await search_with(ScriptedEngine(), MemoryJournal(), strategy)
    steps = [node for node in search.root.children if node.reason == "step"]
    assert steps
    assert all(len(step.children) == 1 and not step.children[0].open for step in steps)


async def test_an_ended_stream_accepts_more_work() -> None:
    async def strategy(search: Search) -> None:
        async with search.stream() as stream:
            for _ in range(3):
                stream.complete([search.root], 1)
                async for nodes in stream:
                    assert len(nodes) == 1

    search = await search_with(ScriptedEngine(), MemoryJournal(), strategy)
    assert [node.path for node in search.root.children] == [(0,), (1,), (2,)]


async def test_a_slow_branch_does_not_block_others() -> None:
    """The first branch arrives only after the others have been followed for two more steps."""
    followed = asyncio.Event()

    class Stubborn(ScriptedEngine):
        async def generate(
            self, request: GenerateRequest, *, stream: bool = False
        ) -> AsyncIterator[Completion | Delta]:
            slow = None
            async for item in super().generate(request, stream=stream):
                if item.index == 0 and len(request.branches) == 4:
                    slow = item
                else:
                    yield item
            if slow is not None:
                await followed.wait()
                yield slow

    async def strategy(search: Search) -> None:
        async with search.stream() as stream:
            stream.expand([search.root], 4)
            async for nodes in stream:
                stream.expand([node for node in nodes if node.open], 1)
                if any(len(node.path) == 3 for node in nodes):
                    followed.set()

    async with asyncio.timeout(20):
        search = await search_with(Stubborn(), MemoryJournal(), strategy)
    assert len(search.root.children) == 4


@given(
    delays=st.integers(0, 10_000),
    kept=st.floats(0, 1),
    tokens=st.one_of(st.none(), st.integers(1, 600)),
    deterministic=st.booleans(),
)
async def test_a_replay_of_a_stream_makes_the_same_tree(
    delays: int, kept: float, tokens: int | None, deterministic: bool
) -> None:
    journal = MemoryJournal()
    budget: dict[str, object] = {"budget": {"tokens": tokens}, "deterministic": deterministic}
    first = await search_with(Delayed(delays), journal, chase, **budget)
    idle = ScriptedEngine()
    again = await search_with(idle, MemoryJournal(journal.entries), chase, **budget)
    assert shape(again.root) == shape(first.root)
    assert again.ledger.usage == first.ledger.usage
    assert again.ledger.max_affordable(Amount(1)) == first.ledger.max_affordable(Amount(1))
    assert idle.total == 0
    prefix = journal.entries[: int(kept * len(journal.entries))]
    resumed = MemoryJournal(prefix)
    await search_with(Delayed(delays + 1), resumed, chase, **budget)
    assert resumed.entries[: len(prefix)] == prefix


@pytest.mark.parametrize("tokens", [None, 150, 40])
async def test_every_branch_ends_with_a_reason_even_if_the_stream_is_left(tokens: int | None) -> None:
    for delays in range(20):
        journal = MemoryJournal()
        await search_with(Delayed(delays), journal, chase, budget={"tokens": tokens})
        begun = {entry.data["node"] for entry in journal.entries if entry.type == "node"}
        ended = {entry.data["node"] for entry in journal.entries if entry.type == "node" and entry.data["final"]}
        assert begun == ended


class Cancelled(MemoryJournal):
    """Journal of a job that is cancelled at one of its commits."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self._left = before

    async def append(self, entries: Sequence[Entry]) -> None:
        await super().append(entries)
        self._left -= 1
        if self._left < 0:
            raise JobCancelled


@pytest.mark.parametrize("tokens", [None, 150, 40])
async def test_a_cancellation_at_a_commit_leaves_every_branch_with_an_end(tokens: int | None) -> None:
    for commit in range(12):
        journal = Cancelled(commit)
        with contextlib.suppress(JobCancelled):
            await search_with(Delayed(commit), journal, chase, budget={"tokens": tokens})
        keys = [entry.key for entry in journal.entries]
        assert len(set(keys)) == len(keys)
        begun = {entry.data["node"] for entry in journal.entries if entry.type == "node"}
        ended = {entry.data["node"] for entry in journal.entries if entry.type == "node" and entry.data["final"]}
        assert begun == ended


@given(one=st.integers(0, 10_000), other=st.integers(0, 10_000), tokens=st.one_of(st.none(), st.integers(1, 600)))
async def test_a_deterministic_stream_makes_the_same_tree_for_any_delays(
    one: int, other: int, tokens: int | None
) -> None:
    options: dict[str, object] = {"deterministic": True, "budget": {"tokens": tokens}}
    first = await search_with(Delayed(one), MemoryJournal(), chase, **options)
    second = await search_with(Delayed(other), MemoryJournal(), chase, **options)
    assert shape(first.root) == shape(second.root)
    assert first.ledger.max_affordable(Amount(1)) == second.ledger.max_affordable(Amount(1))


@given(
    strategy=st.sampled_from(WRITING),
    seed=st.integers(0, 1000),
    one=st.integers(0, 10_000),
    other=st.integers(0, 10_000),
    tokens=st.one_of(st.none(), st.integers(1, 2500)),
    die_after=st.one_of(st.none(), st.integers(0, 40)),
)
async def test_a_deterministic_job_has_the_same_tree_and_result_for_any_delays_and_crashes(
    strategy: str, seed: int, one: int, other: int, tokens: int | None, die_after: int | None
) -> None:
    params = {} if strategy == "greedy" else {"n": 8}
    spec = build_spec(
        {"problem": "how?", "seed": seed, "strategy": {"name": strategy} | params, "deterministic": True}
        | {"budget": {"tokens": tokens}}
    )
    first, second = MemoryJournal(), MemoryJournal()
    outcome = await run_job(spec, Delayed(one), first)
    if tokens is None and die_after is not None:  # a crash costs tokens, so a budget that binds ends elsewhere
        with contextlib.suppress(EngineUnavailable):
            await run_job(spec, Delayed(other, die_after=die_after), second)
    again = await run_job(spec, Delayed(other + 1), second)
    assert again.result == outcome.result
    assert tree(second) == tree(first)


def tree(journal: MemoryJournal) -> dict[str, list[object]]:
    """Return each node's journal entries, by node in order."""
    told: dict[str, list[object]] = {}
    for entry in journal.entries:
        if entry.type == "prune":
            for node in entry.data["nodes"]:
                told[node].append("pruned")
        elif entry.type in ("node", "score"):
            unlike = ("batch", "cached", "computed", "seconds")
            told.setdefault(entry.data["node"], []).append(
                {name: value for name, value in entry.data.items() if name not in unlike}
            )
    return told


async def test_randomness_depends_only_on_seed_node_and_purpose() -> None:
    draws: list[float] = []

    async def strategy(search: Search) -> None:
        child = Node((0,), search.root, ())
        for node, purpose in ((search.root, ""), (search.root, "resample"), (child, ""), (child, "resample")):
            draws.append(search.rng(node, purpose).random())

    await search_with(ScriptedEngine(), MemoryJournal(), strategy)
    await search_with(ScriptedEngine(order=9), MemoryJournal(), strategy)
    await search_with(ScriptedEngine(), MemoryJournal(), strategy, seed=4)
    assert draws[:4] == draws[4:8]
    assert len(set(draws)) == 8


async def test_a_stop_string_ends_a_solution_and_is_left_out_of_it() -> None:
    """Without it the same branches go on, since their noise depends on positions alone."""

    async def strategy(search: Search) -> None:
        async with search.stream() as stream:
            stream.complete([search.root], 6)
            async for _ in stream:
                pass

    plain = await search_with(ScriptedEngine(), MemoryJournal(), strategy)
    word = next(node.text for node in plain.root.children if node.text.count(" ") > 3).split(" ")[1] + " "
    stopped = await search_with(ScriptedEngine(), MemoryJournal(), strategy, stop=[word])
    for before, after in zip(plain.root.children, stopped.root.children, strict=True):
        if word in before.text:
            assert (after.text, after.reason) == (before.text.split(word)[0], "stop")
        else:
            assert (after.text, after.reason) == (before.text, before.reason)
