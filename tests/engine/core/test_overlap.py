"""Steps that are launched before the results of earlier ones are read change no answer, bill, stream or cached page."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core.engine_core import EngineCore
from engine.core.step import Step, StepRunner
from engine.models.interface import UnreadTokens
from engine.protocol.constraint import Constraint
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, Delta, EngineError, ScoreItem, ScoreResult
from engine.runner.sample_step import SamplePlan
from engine.scheduler.sequence import PENDING_TOKEN, Event, GenerateSequence, Sequence
from engine.speculation.control.controller import FixedController
from engine.speculation.drafters.ngram import NgramDrafter
from tests.engine.conftest import Checkpoints
from tests.engine.core.late_device import LateDevice
from tests.engine.helpers import Harness, generate, score
from tests.long import mostly_long
from tests.seeds import shift

AMPLE = EngineOptions(kv_tokens=8192, max_running=64, step_tokens=48)
SCARCE = EngineOptions(kv_tokens=272, max_running=6, step_tokens=32)
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0, "stop_token_ids": tuple(range(0, 360, 17))},
    {"logprobs": 2, "top_p": 0.9, "stop_token_ids": tuple(range(5, 360, 23))},
    {"min_tokens": 7, "stop_token_ids": tuple(range(1, 360, 5))},
    {"stop": ("e",), "min_p": 0.01},
    {"top_k": 40, "prompt_logprobs": 1},
)
CHANGING: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3, "min_tokens": 5, "stop_token_ids": (7, 9)},
    {"logit_bias": ((5, 2.0),), "frequency_penalty": 0.5},
    {"constraint": Constraint("regex", "[a-m ]{3,20}(one|two|[0-9]{1,4})")},
)


def wave(seed: int, number: int) -> list[Any]:
    """Return the requests of one wave; those of all waves share prefixes."""
    dice = random.Random(shift(1000 * seed + number))
    shared = random.Random(shift(seed)).choices(range(3, 360), k=90)
    kinds = SAMPLING + CHANGING if seed % 3 == 0 else SAMPLING
    made: list[Any] = []
    for index in range(dice.randint(1, 4)):
        prompt = shared[: dice.choice((1, 15, 16, 17, 33, 90))] + dice.choices(range(3, 360), k=dice.randint(0, 20))
        kind = {**dice.choice(kinds)}
        constraint = kind.pop("constraint", None)
        lengths = (0, 1, 2, 17, 40) if "prompt_logprobs" in kind else (1, 2, 17, 40)
        branches = [Branch(seed, 10 * number + key, dice.choice(lengths)) for key in range(dice.randint(1, 5))]
        name, pin_key = f"{number}.{index}", dice.choice((None, "search"))
        priority = dice.choice((0, 0, 3, -2))
        request = generate(prompt, branches, request_id=name, pin_key=pin_key, priority=priority, **kind)
        made.append(replace(request, constraint=constraint))
    if dice.random() < 0.5:
        made.append(score(ScoreItem((tuple(shared[:40]), (5, 6)), (0, 1)), token_ids=(7, 8)))
    return made


def paths(core: EngineCore) -> dict[tuple[int, ...], bool]:
    """Return the tokens of every cached page with those before it, and whether it is pinned."""
    found = {}
    for node in core.cache.tree.walk():
        tokens: tuple[int, ...] = ()
        step: Any = node
        while step is not None and step.parent is not None:
            tokens, step = (*step.key, *tokens), step.parent
        found[tokens] = bool(node.pins)
    return found


def is_past_its_end(sequence: Sequence) -> bool:
    """Return True if a step is launched that would compute the last token of a branch."""
    return (
        isinstance(sequence, GenerateSequence)
        and sequence.tokens[-1] == PENDING_TOKEN
        and len(sequence.tokens) >= sequence.max_len
    )


class Run:
    """One run of a seed's waves."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        options: EngineOptions,
        *,
        is_late: bool,
        prepare: Callable[[Harness], None] = lambda _: None,
        disturb: Callable[[Harness, random.Random], None] = lambda *_: None,
        deadline: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.device = LateDevice(is_late=is_late)
        self.events: list[list[Event]] = []
        self.requests: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            self.device.install(patch)
            harness, dice = Harness(folder, options), random.Random(shift(seed))
            prepare(harness)
            for number in range(3):
                for request in wave(seed, number):
                    self.requests.append(request)
                    self.events.append(harness.submit(request, stream=len(self.events) % 2 == 0, deadline=deadline()))
                while harness.core.has_work:
                    harness.core.step()
                    harness.core.check_invariants()
                    assert not any(
                        is_past_its_end(one) for request in harness.core._requests for one in request.sequences
                    )
                    disturb(harness, dice)
            self.stats, self.paths = harness.core.stats, paths(harness.core)
        assert not [event for events in self.events for event in events if isinstance(event, EngineError)]

    def answers(self, *, billed: bool = True) -> list[list[Event]]:
        """Return the results of each request in the order of its branches."""
        results = [
            sorted((one for one in events if isinstance(one, Completion | ScoreResult)), key=lambda one: one.index)
            for events in self.events
        ]
        if billed:
            return [[*some] for some in results]
        return [
            [
                replace(one, cached_tokens=0)
                if isinstance(one, Completion)
                else replace(one, cached_tokens=0, computed_tokens=0)
                for one in some
            ]
            for some in results
        ]

    def check_pins(self) -> None:
        """Check that what is pinned are the computed tokens of each branch with a pin key, and nothing else.

        Where several cached pages begin with the last tokens of a branch, any of them may be the one that is pinned.
        """
        texts = [
            (*request.prompt, *one.token_ids)[:-1]
            for request, events in zip(self.requests, self.events, strict=True)
            for one in events
            if isinstance(one, Completion) and request.pin_key is not None
        ]
        pinned = [path for path, is_pinned in self.paths.items() if is_pinned]
        assert all(any(path[: len(text)] == text for path in pinned) for text in texts)
        size = AMPLE.page_size
        assert all(
            any(len(path) - len(text) <= size and path[: len(text)] == text[: len(path)] for text in texts)
            for path in pinned
        )

    def check_streams(self) -> None:
        for events in self.events[::2]:
            for one in (event for event in events if isinstance(event, Completion)):
                deltas = [event for event in events if isinstance(event, Delta) and event.index == one.index]
                assert "".join(delta.text for delta in deltas) == one.text
                assert tuple(token for delta in deltas for token in delta.token_ids) == one.token_ids


def compare(folder: Path, seed: int) -> Run:
    """Check that all is as in the plain loop; return the run on the late device."""
    late, plain = (Run(folder, seed, AMPLE, is_late=is_late) for is_late in (True, False))
    for ours, theirs in zip(late.answers(), plain.answers(), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one == other
    late.check_streams()
    late.check_pins()
    plain.check_pins()
    assert replace(late.stats, pinned_tokens=0) == replace(plain.stats, pinned_tokens=0)
    assert late.paths.keys() == plain.paths.keys()
    return late


@pytest.mark.parametrize("seed", mostly_long(range(24), every=4))
def test_answers_bills_streams_statistics_and_cached_pages_are_those_of_the_plain_loop(
    seed: int, checkpoints: Checkpoints
) -> None:
    late = compare(checkpoints("llama"), seed)
    assert late.device.num_launched_ahead > (0 if seed % 3 == 0 else late.device.num_steps // 2)


@pytest.mark.parametrize("seed", mostly_long(range(12), every=3))
def test_scarce_memory_changes_no_answer(seed: int, checkpoints: Checkpoints) -> None:
    late, plain = (Run(checkpoints("llama"), seed, SCARCE, is_late=is_late) for is_late in (True, False))
    assert late.answers(billed=False) == plain.answers(billed=False)
    late.check_streams()


@pytest.mark.parametrize("seed", mostly_long(range(12), every=3))
def test_cancelled_branches_have_a_prefix_of_their_answers(seed: int, checkpoints: Checkpoints) -> None:
    def cancel(harness: Harness, dice: random.Random) -> None:
        if harness.core._requests and dice.random() < 0.1:
            chosen = dice.choice(harness.core._requests)
            if isinstance(chosen.sequences[0], GenerateSequence):
                if dice.random() < 0.5:
                    harness.core.launch()  # the results of one more step are not read
                harness.core.cancel(lambda request: request is chosen)
                harness.core.check_invariants()

    plain = Run(checkpoints("llama"), seed, AMPLE, is_late=False)
    late = Run(checkpoints("llama"), seed, AMPLE, is_late=True, disturb=cancel)
    check_prefixes(late, plain, "cancelled")


@pytest.mark.parametrize("first", range(0, 12, 4))
def test_branches_past_their_deadline_have_a_prefix_of_their_answers(
    first: int, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0

    def tick(*_: object) -> None:
        nonlocal now
        now += 1

    reasons = []
    monkeypatch.setattr("engine.core.engine_core.time", SimpleNamespace(monotonic=lambda: now))
    for seed in range(first, first + 4):
        dice = random.Random(shift(seed))

        def draw_deadline(dice: random.Random = dice) -> float:
            return now + dice.randint(4, 40)

        plain = Run(checkpoints("llama"), seed, AMPLE, is_late=False)
        late = Run(checkpoints("llama"), seed, AMPLE, is_late=True, disturb=tick, deadline=draw_deadline)
        check_prefixes(late, plain, "timeout")
        reasons += [one.finish_reason for some in late.answers() for one in some if isinstance(one, Completion)]
    assert "timeout" in reasons


def check_prefixes(late: Run, plain: Run, reason: str) -> None:
    """Check that branches that ended early for ``reason`` have a prefix of their answers, and the bill of it."""
    late.check_streams()
    for ours, theirs in zip(late.answers(), plain.answers(), strict=True):
        for one, whole in zip(ours, theirs, strict=True):
            if isinstance(one, Completion) and isinstance(whole, Completion):
                assert one.token_ids == whole.token_ids[: len(one.token_ids)]
                assert one.finish_reason in (reason, whole.finish_reason)
    generated = sum(len(one.token_ids) for some in late.answers() for one in some if isinstance(one, Completion))
    assert late.stats.generated_tokens == generated


@pytest.mark.parametrize("seed", mostly_long(range(6), every=2))
def test_drafts_are_verified_between_steps_that_overlap(seed: int, checkpoints: Checkpoints) -> None:
    class Pausing(FixedController):
        def update(self, *arguments: Any) -> int:
            super().update(*arguments)
            return 5

    def draft(harness: Harness) -> None:
        harness.core.start_speculation(NgramDrafter(), Pausing(3, 3))

    late = Run(checkpoints("llama"), seed, AMPLE, is_late=True, prepare=draft)
    plain = Run(checkpoints("llama"), seed, AMPLE, is_late=False)
    for ours, theirs in zip(late.answers(), plain.answers(), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(one, Completion) and isinstance(other, Completion):
                assert (one.token_ids, one.text, one.logprob) == (other.token_ids, other.text, other.logprob)
    assert late.device.num_launched_ahead > 0


def keep_ended_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("engine.core.step.drop_last_computed", lambda sequence: None)


def launch_past_the_end(patch: pytest.MonkeyPatch) -> None:
    def append(self: StepRunner, step: Step) -> None:
        for sequence, *_ in [] if step.results.plan is None else step.results.plan.requests:
            sequence.tokens.append(PENDING_TOKEN)

    patch.setattr(StepRunner, "_append_unread", append)


def gather_wrong_rows(patch: pytest.MonkeyPatch) -> None:
    real = UnreadTokens.fill

    def fill(unread: UnreadTokens, tokens: torch.Tensor) -> None:
        real(replace(unread, sampled=unread.sampled.roll(1)), tokens)

    patch.setattr(UnreadTokens, "fill", fill)


def share_unread_tokens(patch: pytest.MonkeyPatch) -> None:
    def advance(self: StepRunner, sequence: Sequence, num_tokens: int) -> bool:
        cache = self.cache
        before, sequence.num_computed = sequence.num_computed, sequence.num_computed + num_tokens
        completes = before < sequence.num_prefix_tokens <= sequence.num_computed
        if completes or sequence.num_computed // cache.page_size > before // cache.page_size:
            cache.publish(sequence.pages, sequence.tokens, sequence.num_computed, include_partial=completes)
        return completes

    patch.setattr(StepRunner, "_advance", advance)


def repeat_a_position(patch: pytest.MonkeyPatch) -> None:
    real = SamplePlan.noise_keys

    def noise_keys(plan: SamplePlan) -> Any:
        keys = real(plan)
        unread = [request.sequence.tokens[-1] == PENDING_TOKEN for request in plan.requests]
        return keys._replace(position=keys.position - unread)

    patch.setattr(SamplePlan, "noise_keys", noise_keys)


def read_nothing_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepRunner, "must_read_first", lambda *_, **__: False)


@pytest.mark.parametrize(
    "plant",
    [
        keep_ended_rows,
        launch_past_the_end,
        gather_wrong_rows,
        share_unread_tokens,
        repeat_a_position,
        read_nothing_first,
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    def is_found(seed: int) -> bool:
        try:
            compare(checkpoints("llama"), seed)
        except (AssertionError, RuntimeError):
            return True
        return False

    assert any(map(is_found, range(24)))
