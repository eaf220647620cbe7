"""Branch segments: their concatenation equals the whole branch, loops end it, and a monitor can end it early."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.types import Branch, EngineUnavailable, TokenizeRequest
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.repetition import MIN_LOOP_TOKENS
from reasoner.run import run_job
from reasoner.search import generation
from reasoner.search.branch_text import BranchText, StreamMonitor
from reasoner.search.generation import SEGMENT_TOKENS
from reasoner.search.search import Search
from reasoner.tree import Node, Reason, make_branch_key
from tests.long import mostly_long_grid
from tests.reasoner.search.test_stream import Delayed, search_with, shape, tree
from tests.scripted import ScriptedEngine, confidence
from tests.specs import build_spec
from tests.strategies import WRITING

NAMES = WRITING


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "SEGMENT_TOKENS", 7)


def spec(strategy: str, seed: int, tokens: int | None = None) -> JobSpec:
    params = {} if strategy == "greedy" else {"n": 8}
    return build_spec(
        {"problem": "how?", "seed": seed, "strategy": {"name": strategy} | params, "budget": {"tokens": tokens}}
        | {"deterministic": True}
    )


@pytest.mark.parametrize(("strategy", "tokens"), mostly_long_grid(NAMES, [None, 300], every=5))
async def test_a_branch_generated_in_segments_equals_the_branch_generated_as_a_whole(
    strategy: str, tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(5):
        whole, parts = MemoryJournal(), MemoryJournal()
        monkeypatch.setattr(generation, "SEGMENT_TOKENS", 10_000)
        first = await run_job(spec(strategy, seed, tokens), ScriptedEngine(), whole)
        monkeypatch.setattr(generation, "SEGMENT_TOKENS", 5)
        engine = Delayed(seed)
        second = await run_job(spec(strategy, seed, tokens), engine, parts)
        asked = [branch.max_tokens for request in engine.requests for branch in request.branches]
        assert max(asked) <= 5 or strategy == "budget_forcing"  # its monitor has its own segments
        assert tree(parts) == tree(whole)
        assert second.result == first.result
        assert second.usage.generated == first.usage.generated == len(set(engine.generated))
        sent = sum(len(request.prompt) + len(one.generated) for request in engine.requests for one in request.branches)
        assert second.usage.prompt == sent


@pytest.mark.usefixtures("short")
@given(strategy=st.sampled_from(NAMES), seed=st.integers(0, 1000), tokens=st.integers(1, 1500))
async def test_segments_keep_the_budget_to_the_token(strategy: str, seed: int, tokens: int) -> None:
    engine = ScriptedEngine(order=seed)
    outcome = await run_job(spec(strategy, seed, tokens), engine, MemoryJournal())
    assert engine.total == outcome.usage.total <= tokens
    assert engine.most <= tokens
    assert engine.outstanding == 0


@pytest.mark.usefixtures("short")
@given(seed=st.integers(0, 1000), die_after=st.integers(0, 30))
async def test_segments_received_before_an_engine_failure_are_committed_and_continued(
    seed: int, die_after: int
) -> None:
    job, journal = spec("self_consistency", seed), MemoryJournal()
    dying, fresh = ScriptedEngine(order=seed, die_after=die_after), ScriptedEngine()
    with contextlib.suppress(EngineUnavailable):
        await run_job(job, dying, journal)
    booked = sum(entry.spend.generated for entry in journal.entries)
    assert booked == dying.total
    outcome = await run_job(job, fresh, journal)
    assert outcome.usage.generated == dying.total + fresh.total


async def samples(search: Search) -> None:
    async for _ in search.complete([search.root], 8):
        pass


async def test_a_loop_ends_its_branch_soon_and_no_other() -> None:
    engine = ScriptedEngine(context=6000, loops=8)
    search = await search_with(engine, MemoryJournal(), samples)
    looping = [node for node in search.root.children if make_branch_key(node.path) % 2 and node.tokens > 8]
    assert looping
    assert all(node.reason == "repetition" and node.tokens <= MIN_LOOP_TOKENS + 8 + SEGMENT_TOKENS for node in looping)
    assert all(node.reason == "stop" for node in search.root.children if node not in looping)
    assert engine.total == search.ledger.usage.generated < 6000


async def test_a_loop_of_whole_steps_is_detected_across_steps() -> None:
    steps: list[Node] = []

    async def strategy(search: Search) -> None:
        step = search.root
        while step.open:
            (step,) = [node async for nodes in search.expand([step], 1, greedy=True) for node in nodes]
            steps.append(step)

    await search_with(ScriptedEngine(context=6000, loops=0), MemoryJournal(), strategy)
    assert {step.tokens for step in steps[1:]} == {12}
    assert [step.reason for step in steps[:-1]] == ["step"] * (len(steps) - 1)
    assert steps[-1].reason == "repetition"
    assert MIN_LOOP_TOKENS <= steps[-1].depth_tokens < MIN_LOOP_TOKENS + 24


async def test_a_watch_gets_every_token_with_its_confidence_and_can_end_the_branch() -> None:
    seen: list[BranchText] = []

    def verdict(branch: BranchText) -> Reason | None:
        seen.append(branch)
        return "pruned" if len(branch.confidence) == 18 else None

    async def strategy(search: Search) -> None:
        async with search.stream() as stream:
            stream.complete([search.root], 8, confidence=3, monitor=StreamMonitor(6, verdict))
            async for _ in stream:
                pass

    journal = MemoryJournal()
    search = await search_with(ScriptedEngine(), journal, strategy)
    ended = [node for node in search.root.children if node.reason == "pruned"]
    assert ended
    assert all(node.tokens == 18 for node in ended)
    assert all(node.tokens < 18 or node in ended for node in search.root.children)
    assert {len(branch.confidence) for branch in seen} == {6, 12, 18}
    assert all(branch.parent is search.root and branch.text for branch in seen)
    assert search.ledger.usage.pruned == 18 * len(ended)
    for node in search.root.children:
        branch, start = Branch(3, make_branch_key(node.path), 1), len(search.root.prefix)
        # The scripted engine reports three tokens at 0, c and 2 c below the likeliest: their mean is c.
        assert node.confidence == tuple(round(confidence(branch, start + at), 3) for at in range(node.tokens))
    again = await search_with(ScriptedEngine(), MemoryJournal(journal.entries), strategy)
    assert shape(again.root) == shape(search.root)
    assert [node.confidence for node in again.root.walk()] == [node.confidence for node in search.root.walk()]


@given(seed=st.integers(0, 10_000), tokens=st.integers(30, 400), one=st.integers(0, 1000), other=st.integers(0, 1000))
async def test_a_watch_is_called_at_the_same_tokens_however_a_budget_cuts_the_branch(
    seed: int, tokens: int, one: int, other: int
) -> None:
    async def strategy(search: Search) -> None:
        async with search.stream() as stream:
            stream.complete([search.root], 6, confidence=2, monitor=StreamMonitor(4, weak))
            async for _ in stream:
                pass

    def weak(branch: BranchText) -> Reason | None:
        return "pruned" if branch.confidence[-1] < 0.8 else None

    free = await search_with(Delayed(one), MemoryJournal(), strategy, seed=seed)
    tight = await search_with(Delayed(other), MemoryJournal(), strategy, seed=seed, budget={"tokens": tokens})
    whole = {node.path: node for node in free.root.children}
    for node in tight.root.children:
        assert whole[node.path].text.startswith(node.text)
        if node.reason not in ("budget", "cancelled"):
            assert (node.reason, node.text) == (whole[node.path].reason, whole[node.path].text)
    given_up = [node.tokens for node in tight.root.children if node.reason == "pruned"]
    assert tight.ledger.usage.pruned == sum(given_up)


@pytest.mark.usefixtures("short")
async def test_leaving_a_stream_ends_branches_between_two_segments() -> None:
    for delays in range(20):
        engine, journal = Delayed(delays), MemoryJournal()

        async def strategy(search: Search) -> None:
            async with search.stream() as stream:
                stream.complete([search.root], 8)
                async for _ in stream:
                    break

        search = await search_with(engine, journal, strategy)
        assert engine.total == search.ledger.usage.generated
        assert {node.reason for node in search.root.children} <= {"stop", "cancelled", "context"}
        ended = [node.path for node in search.root.children]
        assert len(set(ended)) == len(ended)


async def test_injected_text_is_read_by_the_model_and_not_billed() -> None:
    said: list[Node] = []

    async def strategy(search: Search) -> None:
        async with search.stream() as stream:
            stream.complete([search.root], 4)
            async for nodes in stream:
                for node in nodes:
                    if node.reason == "stop" and len(node.path) == 1:
                        said.append(await search.append_text(node, "Wait,"))
                        stream.complete(said[-1:], 1)

    engine, journal = ScriptedEngine(), MemoryJournal()
    search = await search_with(engine, journal, strategy)
    assert said
    wait = await engine.tokenize(TokenizeRequest("policy", "Wait,"))
    for node in said:
        assert node.parent is not None
        assert node.parent.prefix[-1] == 0, "the branch ended with the end of sequence"
        assert node.prefix == node.parent.prefix[:-1] + wait
        assert node.reason == "said"
        assert node.children[0].solution == node.parent.text + "Wait," + node.children[0].text
        assert node.children[0].depth_tokens == node.parent.tokens + node.children[0].tokens
    assert search.ledger.usage.generated == engine.total
    again = await search_with(ScriptedEngine(), MemoryJournal(journal.entries), strategy)
    assert shape(again.root) == shape(search.root)


async def test_a_marker_is_removed_by_its_own_tokens_or_by_tokenizing_again() -> None:
    results: list[Node] = []

    async def strategy(search: Search) -> None:
        alone = Node((0,), search.root, search.root.prefix + (9, 8) + await search.tokenize("</t>"), "so</t>")
        merged = Node((1,), search.root, (*search.root.prefix, 9, 7), "so</t>")
        for node in (alone, merged):
            results.append(await search.append_text(node, "Wait", instead="</t>"))
        results.append(await search.append_text(alone, "Wait", instead="</u>"))

    search = await search_with(ScriptedEngine(), MemoryJournal(), strategy)
    wait = await search.tokenize("Wait")
    alone, merged, kept = results
    assert alone.prefix == (*search.root.prefix, 9, 8, *wait)
    assert merged.prefix == search.root.prefix + await search.tokenize("so") + wait
    assert alone.solution == merged.solution == "soWait"
    assert kept.solution == "so</t>Wait"


async def test_a_new_conversation_has_its_own_prompt_solution_and_length() -> None:
    asked: list[Node] = []

    async def strategy(search: Search) -> None:
        async with search.stream() as stream:
            stream.complete([search.root], 1)
            async for nodes in stream:
                if not asked:
                    asked.append(await search.start_conversation(nodes[0], [{"role": "user", "content": "Again."}]))
                    stream.complete(asked, 2)

    engine, journal = ScriptedEngine(), MemoryJournal()
    await search_with(engine, journal, strategy)
    (node,) = asked
    assert node.prefix == await engine.tokenize(TokenizeRequest("policy", "Again."))
    assert len(node.children) == 2
    for child in node.children:
        assert child.solution == child.text
        assert child.depth_tokens == child.tokens
        assert child.completion_ids == child.prefix[len(node.prefix) :]


async def test_injected_text_that_exceeds_the_context_ends_its_branch() -> None:
    async def strategy(search: Search) -> None:
        node = await search.append_text(search.root, "x" * 300)
        assert node.reason == "context"
        assert not [nodes async for nodes in search.complete([node], 1)]

    await search_with(ScriptedEngine(), MemoryJournal(), strategy)
