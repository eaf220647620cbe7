"""Thoughts in a search: the parts of nodes, the limit of a thought, and what is billed, however branches are cut."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.types import Branch, EngineUnavailable, InvalidRequest, TokenizeRequest
from prm.scorers.judge import Judge
from prm.scorers.steps import StepScorer
from reasoner.admission.refusal import JobRefused
from reasoner.budget.usage import Usage
from reasoner.jobs.journal import Entry, MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from reasoner.search import generation
from reasoner.search.replay import BILLED_ONLY
from reasoner.tree import read_parts
from tests.long import mostly_long_grid
from tests.reasoner.search.test_stream import Delayed, tree
from tests.scripted import OPENING, TEXTS, THOUGHT, ScriptedEngine
from tests.specs import build_spec

CLOSE = TEXTS[THOUGHT]


class Thinker(Delayed):
    """Engine whose prompts open a thought, or that opens it by itself, or answers without one."""

    def __init__(self, delays: int = 0, *, opens: str = "prompt", **more: int) -> None:
        super().__init__(delays, thinks=True, **more)
        self._opens = opens

    async def tokenize(self, request: TokenizeRequest) -> tuple[int, ...]:
        tokens = await super().tokenize(request)
        return tokens if isinstance(request.text, str) or self._opens == "prompt" else tokens[:-1]

    def token(self, branch: Branch, position: int, temperature: float) -> int:
        is_first = self._opens == "model" and position == len("how?")
        token = super().token(branch, position, temperature)
        return token if not is_first else OPENING


def spec(strategy: str, seed: int, **more: object) -> JobSpec:
    params = {} if strategy == "greedy" else {"n": 6}
    return build_spec(
        {"problem": "how?", "seed": seed, "strategy": {"name": strategy} | params, "deterministic": True} | more
    )


def nodes_of(journal: MemoryJournal) -> dict[str, list[Entry]]:
    nodes: dict[str, list[Entry]] = {}
    for entry in journal.entries:
        if entry.type == "node":
            nodes.setdefault(entry.data["node"], []).append(entry)
    return nodes


def shape_of(journal: MemoryJournal) -> dict[str, tuple[object, ...]]:
    """Return the content of each node, whose branch may have arrived in several parts."""
    shapes: dict[str, tuple[object, ...]] = {}
    for name, entries in nodes_of(journal).items():
        text = "".join(entry.data["text"] for entry in entries)
        tokens = [token for entry in entries for token in entry.data["token_ids"]]
        last = entries[-1].data
        shapes[name] = (text, tokens, last["reason"], last["answer"], last.get("thought"), last["parts"])
    return shapes


def check_parts(journal: MemoryJournal, outcome: JobOutcome, limit: int | None, lost: Usage = Usage()) -> None:
    """Check the invariants of thoughts: parts cover the text, only the limit injects, and the bill counts tokens."""
    thought_tokens = generated = 0
    nodes = nodes_of(journal)
    by_branch: dict[str, int] = {}
    for name, entries in nodes.items():
        data = entries[-1].data
        text = "".join(entry.data["text"] for entry in entries)
        num_tokens = sum(len(entry.data["token_ids"]) for entry in entries)
        parts = read_parts(data)
        assert sum(part.num_chars for part in parts) == len(text)
        if data["reason"] == "said":
            continue
        assert sum(part.num_tokens for part in parts) == num_tokens
        if "copy_of" in data:
            continue
        own = sum(part.num_tokens for part in parts if (part.kind, part.origin) == ("thought", "generated"))
        thought_tokens += own
        generated += sum(part.num_tokens for part in parts if part.origin == "generated")
        by_branch[name] = own + by_branch.get(data["parent"], 0)
        if limit is not None:
            assert by_branch[name] <= limit
        start = 0
        for part in parts:
            piece = text[start : start + part.num_chars]
            start += part.num_chars
            if part.origin == "injected":
                assert CLOSE in piece or not piece.strip()
            elif part.kind == "thought":
                assert CLOSE not in piece.removesuffix(CLOSE)
    assert outcome.usage.thought == thought_tokens + lost.thought
    assert outcome.usage.generated == generated + lost.generated


@pytest.mark.parametrize(
    ("strategy", "limit"),
    mostly_long_grid(
        ["self_consistency", "greedy", "beam", "mcts", "weighted_vote", "deepconf", "auto"],
        [None, 0, 1, 9, 30],
        every=4,
    ),
)
async def test_parts_and_the_limit_hold_however_a_branch_is_cut(
    strategy: str, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(4):
        trees = []
        for size in (10_000, 5, 1):
            monkeypatch.setattr(generation, "SEGMENT_TOKENS", size)
            journal, engine = MemoryJournal(), Thinker(seed)
            job = spec(strategy, seed, budget={"tokens": 600, "thinking_tokens": limit})
            outcome = await run_job(job, engine, journal)
            check_parts(journal, outcome, limit)
            assert engine.most <= 600
            trees.append(tree(journal))
        assert trees[0] == trees[1] == trees[2]


@given(
    st.integers(0, 10_000), st.integers(1, 60), st.sampled_from([None, 4, 17]), st.sampled_from(["beam", "best_of_n"])
)
async def test_an_interrupted_search_has_the_same_parts(die: int, seed: int, limit: int | None, strategy: str) -> None:
    job = spec(strategy, seed, budget={"thinking_tokens": limit})
    whole, interrupted = MemoryJournal(), MemoryJournal()
    expected = await run_job(job, Thinker(seed), whole)
    with contextlib.suppress(EngineUnavailable):
        await run_job(job, Thinker(seed + 1, die_after=die % 12), interrupted)
    outcome = await run_job(job, Thinker(seed + 2), interrupted)
    assert shape_of(interrupted) == shape_of(whole)
    assert outcome.result == expected.result
    lost = [entry.spend for entry in interrupted.entries if entry.type == BILLED_ONLY]
    check_parts(interrupted, outcome, limit, sum(lost, Usage()))


async def test_answers_come_from_what_follows_the_thought() -> None:
    answered = 0
    for seed in range(12):
        journal = MemoryJournal()
        await run_job(spec("self_consistency", seed), Thinker(seed), journal)
        for entries in nodes_of(journal).values():
            data, text = entries[-1].data, "".join(entry.data["text"] for entry in entries)
            answer = text.split(CLOSE, 1)[1] if CLOSE in text else ""
            assert (data["answer"] is None) or "\\boxed{" + data["answer"] + "}" in answer
            answered += data["answer"] is not None
    assert answered > 10


async def test_a_thought_that_the_budget_cuts_between_two_parts_states_no_answer() -> None:
    num_cut = 0
    for seed in range(12):
        for tokens in (40, 100):
            journal = MemoryJournal()
            job = spec("self_consistency", seed, budget={"tokens": tokens})
            check_parts(journal, await run_job(job, Thinker(seed), journal), None)
            for entries in nodes_of(journal).values():
                data, text = entries[-1].data, "".join(entry.data["text"] for entry in entries)
                if data["reason"] == "budget" and CLOSE not in text:
                    num_cut += "boxed" in text
                    assert data["answer"] is None
                    assert data["thought"]["state"] == "open"
    assert num_cut > 4


async def test_a_model_that_opens_its_thought_by_itself_and_one_that_has_none_are_told_apart() -> None:
    for opens, kind in (("model", "thought"), ("never", "answer")):
        journal = MemoryJournal()
        outcome = await run_job(spec("beam", 2, budget={"tokens": 300}), Thinker(1, opens=opens), journal)
        first = [entries[-1].data for name, entries in nodes_of(journal).items() if "." not in name]
        assert first
        assert {data["parts"][0][0] for data in first} == {kind}
        assert (outcome.usage.thought > 0) == (kind == "thought")


async def test_a_limit_for_a_model_without_thoughts_or_above_the_budget_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="has no known delimiters of thoughts"):
        await run_job(spec("greedy", 1, budget={"thinking_tokens": 10}), ScriptedEngine(), MemoryJournal())
    with pytest.raises(JobRefused, match="a thought of 100 tokens does not fit into the job's 50 tokens"):
        spec("greedy", 1, budget={"tokens": 50}, sampling={"thinking_tokens": 100})


@pytest.mark.parametrize("reads", ["answer", "thought", "all"])
@pytest.mark.parametrize(("kind", "scorer", "method"), [("prm", StepScorer, "steps"), ("judge", Judge, "score")])
async def test_a_verifier_reads_the_parts_that_it_says(
    kind: str, scorer: type, method: str, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[str] = set()
    original = getattr(scorer, method)

    def recording(self: object, texts: str | Sequence[str], **more: object) -> object:
        read.update([texts] if isinstance(texts, str) else texts)
        return original(self, texts, **more)

    monkeypatch.setattr(scorer, method, recording)
    for seed in range(8):
        read.clear()
        journal = MemoryJournal()
        await run_job(spec("weighted_vote", seed, verifier={"kind": kind, "reads": reads}), Thinker(1), journal)
        parts = {"answer": set[str](), "thought": set[str](), "all": set[str]()}
        for entries in nodes_of(journal).values():
            text = "".join(entry.data["text"] for entry in entries)
            thought, close, answer = text.partition(CLOSE)
            parts["all"].add(text)
            parts["thought"].add(thought + close)
            parts["answer"].add(answer)
        assert read
        assert read <= parts[reads]
