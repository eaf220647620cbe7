"""Rollouts of random trees: prefixes, alignment, and every generated token once."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from reasoner.budget.usage import Usage
from reasoner.jobs.events import read_data
from reasoner.jobs.journal import Entry
from reasoner.training_data.recorded_job import LeftOut, RecordedJob
from reasoner.training_data.rollouts import build_rollouts
from reasoner.training_data.rows import RolloutRow
from tests.reasoner.training_data.recorded import record
from tests.specs import build_spec

SPEC = build_spec(problem="?", record_logprobs=True).model_dump()
KINDS = ["generated", "generated", "injected", "trimmed", "conversation", "question", "tool", "copy", "empty"]


@dataclass
class Grown:
    """A random tree, written as a search writes its journal, and what is true of it by construction."""

    through: dict[str, list[int]] = field(default_factory=lambda: {"": [1, 2, 3]})
    """All tokens through each node."""
    generated: set[int] = field(default_factory=set)
    """Tokens that must be trained: each has a number of its own."""
    entries: list[Entry] = field(default_factory=list)
    numbers: Any = field(default_factory=lambda: count(10))
    children: Counter[str] = field(default_factory=Counter)
    questions: set[str] = field(default_factory=set)
    """Nodes that belong to questions about solutions."""

    def new_tokens(self, length: int) -> list[int]:
        return [next(self.numbers) for _ in range(length)]

    def grow(self, parent: str, kind: str, length: int) -> None:
        name = f"{parent}.{self.children[parent]}".removeprefix(".")
        self.children[parent] += 1
        if kind == "question" or parent in self.questions:
            self.questions.add(name)
        above, ids = self.through[parent], self.new_tokens(length)
        if kind in ("injected", "trimmed", "conversation", "question"):
            starts = kind in ("conversation", "question")
            kept = [] if starts else above[:-1] if kind == "trimmed" else above
            self.through[name] = kept + ids
            more = {"fresh": starts, "solves": kind != "question", "undone": 1 if kind == "trimmed" else 0}
            self._write(name, parent, [], text="x" * length, reason="said", **more)
            self._write_prompt(name)
            return
        if kind == "empty":
            ids = []
        trained = set(ids)
        parts: list[list[Any]] = []
        if kind == "tool":
            output = self.new_tokens(2)
            tail = self.new_tokens(1)
            trained |= set(tail)
            sizes = ((len(ids), "generated"), (2, "tool"), (1, "generated"))
            parts = [["answer", origin, size, size] for size, origin in sizes]
            ids = ids + output + tail
        if kind == "copy":
            trained = set()
        if name not in self.questions:
            self.generated |= trained
        self.through[name] = above + ids
        logprobs = [-token / 1000 if token in trained or kind == "copy" else None for token in ids]
        more = ({"parts": parts} if parts else {}) | ({"copy_of": "0"} if kind == "copy" else {})
        self._write(name, parent, ids, text="y" * len(ids), reason="stop", logprobs=logprobs, **more)

    def _write(self, name: str, parent: str, ids: list[int], text: str, reason: str, **more: Any) -> None:
        data = {"node": name, "parent": parent, "part": 0, "text": text, "token_ids": ids, "tokens": len(ids)}
        data |= {"cached": 0, "logprob": 0.0, "final": True, "reason": reason, "answer": None, "batch": 0}
        self._add("node", name, data | more)

    def _write_prompt(self, name: str) -> None:
        self._add("prompt", name, {"node": name, "token_ids": self.through[name], "batch": 0})

    def _add(self, type: str, name: str, data: dict[str, Any]) -> None:
        read_data(type, data)
        self.entries.append(Entry(f"{type}:{name}", type, data, Usage(), 0.0))

    def record(self) -> RecordedJob:
        return record(SPEC, "completed", None, self.entries)


@st.composite
def trees(draw: st.DrawFn) -> Grown:
    grown = Grown()
    grown._write_prompt("")
    for _ in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from(sorted(grown.through)))
        grown.grow(parent, draw(st.sampled_from(KINDS)), draw(st.integers(1, 3)))
    return grown


def rows_of(grown: Grown) -> list[RolloutRow]:
    with suppress(LeftOut):
        return build_rollouts(grown.record(), "answer")
    return []


@settings(max_examples=300, deadline=None)
@given(trees())
def test_what_a_row_has_through_a_node_is_the_beginning_of_what_its_child_has(grown: Grown) -> None:
    for row in rows_of(grown):
        ends = dict(zip(row["path"], row["path_ends"], strict=True))
        assert row["path_ends"] == sorted(row["path_ends"])
        for node, end in ends.items():
            assert row["prompt_ids"] + row["response_ids"][:end] == grown.through[node]
        for parent, node in pairwise(row["path"]):
            assert node.rpartition(".")[0] == parent
        assert row["node"] == row["path"][-1]


@settings(max_examples=300, deadline=None)
@given(trees())
def test_mask_and_logprobs_are_aligned_with_the_tokens(grown: Grown) -> None:
    for row in rows_of(grown):
        columns = (row["response_ids"], row["response_mask"], row["response_logprobs"])
        for token, is_trained, logprob in zip(*columns, strict=True):
            assert is_trained == (token in grown.generated)
            assert logprob == (-token / 1000 if is_trained else 0.0)


@settings(max_examples=300, deadline=None)
@given(trees())
def test_behind_what_rows_share_each_generated_token_is_trained_once(grown: Grown) -> None:
    trained: Counter[int] = Counter()
    earlier: set[int] = set()
    for row in rows_of(grown):
        shared = row["response_ids"][: row["shared_tokens"]]
        new = row["response_ids"][row["shared_tokens"] :]
        assert earlier.issuperset(shared)
        assert earlier.isdisjoint(new)
        earlier |= {*row["response_ids"]}
        mask = row["response_mask"][row["shared_tokens"] :]
        trained.update(token for token, is_trained in zip(new, mask, strict=True) if is_trained)
    assert trained == Counter(grown.generated)
