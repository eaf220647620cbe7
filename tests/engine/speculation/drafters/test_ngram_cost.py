"""Time and memory of the n-gram drafter."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, SupportsIndex

import pytest

from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch
from engine.speculation.control.controller import FixedController
from engine.speculation.drafter import DraftRequest
from engine.speculation.drafters import ngram
from engine.speculation.drafters.ngram import NgramDrafter
from kernels import ngrams
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate
from tests.engine.speculation.drafters.ngram_requests import (
    NO_STATES,
    advances,
    branches_of,
    chain,
    finish,
    only,
    request,
    step,
    write,
)
from tests.seeds import shift


class Watched(list[int]):
    """A list of tokens that counts its reads."""

    looks = 0

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        found = super().__getitem__(place)
        Watched.looks += len(found) if isinstance(found, list) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        Watched.looks += len(self)
        return super().__iter__()


def operations(work: Callable[[], object]) -> int:
    """Count the executed lines of the drafter and the tokens that it reads."""
    files, lines = {ngram.__file__, ngrams.__file__}, 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace if frame.f_code.co_filename in files else None

    before, Watched.looks = sys.gettrace(), 0
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines + Watched.looks


def test_no_state_is_kept_of_a_request_cancelled_with_waiting_branches(checkpoints: Checkpoints) -> None:
    harness, drafter = Harness(checkpoints("qwen3"), EngineOptions(kv_tokens=4096, max_running=2)), NgramDrafter()
    harness.core.start_speculation(drafter, FixedController(3, 3))
    harness.submit(generate([5, 6, 5, 6, 5], [Branch(1, key, 30) for key in range(4)], ignore_eos=True))
    for _ in range(4):
        harness.core.step()
    assert drafter._branches
    harness.core.cancel(lambda _: True)
    assert not drafter._branches


def test_the_cost_of_a_step_does_not_depend_on_text_lengths() -> None:
    noise = random.Random(shift(5))

    def text(length: int) -> list[int]:
        """Return a text in which two tokens may follow each token, so that longer texts have no longer matches."""
        tokens = [noise.randrange(20)]
        while len(tokens) < length:
            tokens.append((2 * tokens[-1] + noise.randrange(2)) % 20)
        return tokens

    costs = {}
    for length in (2000, 16_000):
        drafter = NgramDrafter()
        sequences = branches_of([request([1, 2, 3], 4)])
        for sequence in sequences:
            sequence.tokens = Watched([*sequence.tokens, *text(length)])
        step(drafter, {sequence: text(2) for sequence in sequences}, (4, 8))
        steps = [{sequence: text(2) for sequence in sequences} for _ in range(20)]
        costs[length] = operations(
            lambda drafter=drafter, steps=steps: [step(drafter, drawn, (4, 8)) for drawn in steps]
        )
    assert costs[16_000] < 1.15 * costs[2000]


def test_a_step_without_draft_requests_costs_almost_nothing_per_branch() -> None:
    noise = random.Random(shift(7))
    costs = {}
    for count in (128, 512):
        drafter = NgramDrafter()
        sequences = branches_of([request(noise.choices(range(40), k=30), count)])
        drafter.observe_step(advances(sequences), NO_STATES)
        for sequence in sequences:
            sequence.tokens.append(noise.randrange(40))
        costs[count] = operations(
            lambda drafter=drafter, all_=advances(sequences): drafter.observe_step(all_, NO_STATES)
        )
    assert (costs[512] - costs[128]) / (512 - 128) < 12


def growth(drafter: NgramDrafter, work: Callable[[int], object]) -> float:
    """Return the factor by which the drafter's memory grows from the first rounds to later ones."""
    files = [tracemalloc.Filter(True, module.__file__) for module in (ngram, ngrams)]
    tracemalloc.start()
    try:
        sizes = []
        for number in range(60):
            work(number)
            if number in (10, 12, 14, 16, 45, 50, 55, 59):
                held = tracemalloc.take_snapshot().filter_traces(files)
                # ``tracemalloc`` does not see the memory of the large arrays.
                table = drafter._table.num_bytes
                sizes.append(table + sum(trace.size for trace in held.traces))
        return max(sizes[4:]) / max(sizes[:4])
    finally:
        tracemalloc.stop()


def fresh(number: int, length: int) -> list[int]:
    """Return tokens that occur in no other text."""
    return list(range(1000 * number + 1000, 1000 * number + 1000 + length))


@pytest.mark.parametrize(
    "pin_key", [lambda _: "one", lambda number: f"search {number}", lambda _: None], ids=["one", "many", "none"]
)
def test_memory_is_bounded_for_one_search_and_for_many(pin_key: Callable[[int], str | None]) -> None:
    drafter = NgramDrafter()

    def search(number: int) -> None:
        write(drafter, request(fresh(number, 50), 2, pin_key(number)), fresh(number, 100)[50:])

    assert growth(drafter, search) < 1.01


def test_memory_is_bounded_without_draft_requests() -> None:
    drafter = NgramDrafter()

    def arrive_and_leave(number: int) -> None:
        sequences = branches_of([request(fresh(number, 20), 30, "search")])
        for place, sequence in enumerate(sequences):
            sequence.tokens += fresh(30 * number + place, 20)
            sequence.num_computed = len(sequence.tokens)
        drafter.observe_step(advances(sequences), NO_STATES)
        for sequence in sequences:
            finish(drafter, sequence)

    assert growth(drafter, arrive_and_leave) < 1.01


def test_only_the_end_of_a_long_prefix_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_PREFIX", 30)
    drafter = NgramDrafter()
    text = fresh(0, 290)
    assert chain(drafter, only(request([*text, *text[200:210]], namespace="some")), 3) == []
    assert chain(drafter, only(request([*text, *text[275:285]], namespace="others")), 3) == text[285:288]


def test_each_step_reads_a_bounded_part_of_unread_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_AT_ONCE", 150)
    drafter = NgramDrafter()
    *siblings, last = branches_of([request([1, 2], 5, "search")])
    for number, sequence in enumerate(siblings):
        sequence.tokens += [3, *range(100 * number + 100, 100 * number + 200)]
        sequence.num_computed = len(sequence.tokens)
        finish(drafter, sequence)
    last.tokens += [3]
    offered = [set(drafter.propose([DraftRequest(last, 1, 9)])[0].tokens) for _ in range(3)]
    assert offered == [{100, 200}, {100, 200, 300, 400}, {100, 200, 300, 400}]
