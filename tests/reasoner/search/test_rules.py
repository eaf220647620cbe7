"""A rule of one's own: one object in the list cuts and extends branches, and all that holds for the others holds."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest

from engine.protocol.types import Completion, EngineUnavailable
from reasoner.budget.usage import Usage
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import run_job
from reasoner.search import generation
from reasoner.search.branch_text import BranchText
from reasoner.search.replay import BILLED_ONLY
from reasoner.search.rules import chain
from reasoner.search.rules.rule import End, Inject, NewBranch, Rule, Verdict
from reasoner.tree import read_parts
from tests.reasoner.search.test_stream import Delayed, tree
from tests.reasoner.search.test_thoughts import Thinker, nodes_of, shape_of
from tests.specs import build_spec

WAIT, WAIT_TOKENS = " Wait,", (60, 61, 62)
DOUBT_AT, END_AT = 8, 20


@dataclass(frozen=True, slots=True)
class Doubt(Rule):
    """After some tokens the search adds a text, and some tokens later it ends the branch."""

    @property
    def every(self) -> int:
        return 4

    async def after(self, text: BranchText, segment: Completion) -> Verdict:
        if segment.finish_reason != "length":
            return None
        if len(text.token_ids) == DOUBT_AT and text.tokens_left > len(WAIT_TOKENS):
            return Inject(WAIT_TOKENS, WAIT)
        return End("pruned") if len(text.token_ids) == END_AT else None


def make_doubt(_: NewBranch) -> Doubt:
    return Doubt()


@pytest.fixture(autouse=True)
def _doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "RULES", (*chain.RULES, make_doubt))


def make_engine(delays: int, die_after: int | None = None, *, thinks: bool) -> Delayed:
    dying = {} if die_after is None else {"die_after": die_after}
    return Thinker(delays, **dying) if thinks else Delayed(delays, **dying)


def spec(seed: int, **more: object) -> JobSpec:
    strategy = {"name": "self_consistency", "n": 6}
    return build_spec(
        {"problem": "how?", "seed": seed, "strategy": strategy, "deterministic": True, "answer": "text"} | more
    )


def check(journal: MemoryJournal) -> tuple[int, int]:
    """Return the numbers of injected texts and of generated tokens, after a check of where the rule has cut."""
    injected = generated = 0
    for entries in nodes_of(journal).values():
        text = "".join(entry.data["text"] for entry in entries)
        token_ids = [token for entry in entries for token in entry.data["token_ids"]]
        end = entries[-1].data
        has_doubt = len(token_ids) > DOUBT_AT
        assert tuple(token_ids[DOUBT_AT : DOUBT_AT + len(WAIT_TOKENS)]) == WAIT_TOKENS * has_doubt
        assert (WAIT in text) == has_doubt
        assert len(token_ids) <= END_AT
        assert (end["reason"] == "pruned") == (len(token_ids) == END_AT and end["reason"] != "stop")
        assert sum(part.num_tokens for part in read_parts(end) if part.origin == "injected") == 3 * has_doubt
        injected += has_doubt
        generated += len(token_ids) - 3 * has_doubt
    return injected, generated


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("tokens", [None, 60])
async def test_it_injects_and_ends_alike_however_a_branch_is_cut_or_delayed(thinks: bool, tokens: int | None) -> None:
    total = 0
    for seed in range(4):
        trees = []
        for delays in range(3):
            journal, engine = MemoryJournal(), make_engine(delays, thinks=thinks)
            job = spec(seed, budget={"tokens": tokens})
            outcome = await run_job(job, engine, journal)
            injected, generated = check(journal)
            assert outcome.usage.generated == generated == engine.total == len(set(engine.generated))
            assert tokens is None or engine.most <= tokens
            trees.append(tree(journal))
            total += injected
        assert trees[0] == trees[1] == trees[2]
    assert total > 10


@pytest.mark.parametrize("thinks", [False, True])
async def test_a_resumed_search_has_the_same_branches_and_pays_for_no_token_twice(thinks: bool) -> None:
    for die_after in range(1, 14):
        whole, interrupted = MemoryJournal(), MemoryJournal()
        expected = await run_job(spec(die_after), make_engine(0, thinks=thinks), whole)
        dying, fresh = make_engine(1, die_after, thinks=thinks), make_engine(2, thinks=thinks)
        with contextlib.suppress(EngineUnavailable):
            await run_job(spec(die_after), dying, interrupted)
        outcome = await run_job(spec(die_after), fresh, interrupted)
        assert outcome.result == expected.result
        assert outcome.usage.generated == dying.total + fresh.total
        lost = sum((entry.spend for entry in interrupted.entries if entry.type == BILLED_ONLY), Usage())
        assert check(interrupted)[1] == outcome.usage.generated - lost.generated
        if thinks:
            assert shape_of(interrupted) == shape_of(whole)


@pytest.mark.parametrize("thinks", [False, True])
async def test_any_beginning_of_a_journal_is_replayed_to_the_same_tree(
    thinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "SEGMENT_TOKENS", 3)
    journal = MemoryJournal()
    outcome = await run_job(spec(5, budget={"tokens": 80}), make_engine(1, thinks=thinks), journal)
    assert check(journal)[0]
    batches = {entry.data["batch"] for entry in journal.entries}
    for batch in sorted(batches):
        beginning = [entry for entry in journal.entries if entry.data["batch"] < batch]  # each is written as a whole
        replayed, engine = MemoryJournal(beginning), make_engine(2, thinks=thinks)
        again = await run_job(spec(5, budget={"tokens": 80}), engine, replayed)
        assert tree(replayed) == tree(journal)
        assert again.result == outcome.result
        assert again.usage.generated == outcome.usage.generated
        assert engine.total == outcome.usage.generated - sum(entry.spend.generated for entry in beginning)
