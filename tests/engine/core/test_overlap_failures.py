"""A failure while a step is in flight ends the request that causes it alone; others get the plain loop's answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.types import Branch, Completion, EngineError
from engine.runner import sample_step
from engine.runner.batch import ScheduledSequence
from engine.sampling.logits_processors import LogitsRow
from engine.scheduler.sequence import Event, GenerateSequence
from tests.engine.conftest import Checkpoints
from tests.engine.core.late_device import LateDevice, LateSamples
from tests.engine.core.test_overlap import AMPLE
from tests.engine.helpers import Harness, generate
from tests.seeds import shift

BAD = "bad"
Fail = Callable[[int, LateDevice, pytest.MonkeyPatch], None]


def is_due(sequence: object, after: int) -> bool:
    return (
        isinstance(sequence, GenerateSequence)
        and sequence.request.request_id == BAD
        and len(sequence.tokens) >= sequence.prompt_len + after
    )


def fail_at_launch(after: int, device: LateDevice, patch: pytest.MonkeyPatch) -> None:
    real = sample_step.sample_and_score

    def sample_and_score(work: list[ScheduledSequence], **rest: Any) -> Any:
        if any(is_due(one.sequence, after) for one in work):
            raise RuntimeError("something broke")
        return real(work, **rest)

    patch.setattr("engine.core.step.sample_and_score", sample_and_score)


def fail_by_numbers(after: int, device: LateDevice, patch: pytest.MonkeyPatch) -> None:
    """Let the device sample -1 of the request's rows, as the sampling kernels do where logits are not finite."""
    real = sample_step._sample
    bad: list[int] = []

    def sample_rows(plan: sample_step.SamplePlan, *rest: Any) -> Any:
        bad[:] = [row for row, one in enumerate(plan.requests) if is_due(one.sequence, after)]
        return real(plan, *rest)

    def sample(logits: Any, rows: Sequence[LogitsRow], *rest: Any) -> LateSamples:
        samples, marked = device.sample(logits, rows, *rest), [*bad]
        device.launch(lambda: samples.tokens_gpu.__setitem__(marked, -1))
        return samples

    patch.setattr("engine.runner.sample_step._sample", sample_rows)
    patch.setattr("engine.core.step.sample_on_gpu", sample)
    patch.setattr("engine.core.step.sample_on_cpu", sample)


def run(
    folder: Path, seed: int, after: int, fail: Fail | None, *, is_late: bool
) -> tuple[LateDevice, list[list[Event]], list[set[int]]]:
    """Run five requests together, of which the third fails once it has ``after`` tokens.

    Return the device, the events of each request, and the indices of its branches that had not started by the failure.
    """
    dice, device = random.Random(shift(seed)), LateDevice(is_late=is_late)
    shared = dice.choices(range(3, 360), k=40)
    with pytest.MonkeyPatch.context() as patch:
        device.install(patch)
        if fail is not None:
            fail(after, device, patch)
        harness = Harness(folder, AMPLE)
        events: list[list[Event]] = []
        for number in range(5):
            prompt = shared[: dice.choice((1, 16, 33, 40))] + dice.choices(range(3, 360), k=dice.randint(1, 20))
            branches = [Branch(seed, 10 * number + key, dice.choice((9, 25, 40))) for key in range(dice.randint(1, 3))]
            name = BAD if number == 2 else f"{number}"
            # The failing request must not end before it fails.
            ends = {"ignore_eos": True} if name == BAD else {"stop_token_ids": (9, 50, 77)}
            events.append(harness.submit(generate(prompt, branches, request_id=name, **ends)))
        started, waiting = [*harness.core._requests], [set[int]() for _ in range(5)]
        record_failure = harness.core._recovery.record_failure

        def record(*arguments: Any) -> Any:
            if harness.core._recovery.bisection is None:
                waiting[:] = [{one.index for one in request.sequences if one.num_cached is None} for request in started]
            return record_failure(*arguments)

        patch.setattr(harness.core._recovery, "record_failure", record)
        harness.run()
        harness.core.check_invariants()
    return device, events, waiting


def completions(events: list[Event]) -> list[Completion]:
    return sorted((one for one in events if isinstance(one, Completion)), key=lambda one: one.index)


def bill(results: list[Completion], waiting: set[int]) -> list[Completion]:
    """Return results without what the cache had for branches that started after the failure, which emptied it."""
    return [replace(one, cached_tokens=0) if one.index in waiting else one for one in results]


def check(folder: Path, seed: int, fail: Fail) -> None:
    after = seed % 4
    device, late, waiting = run(folder, seed, after, fail, is_late=True)
    _, plain, _ = run(folder, seed, after, None, is_late=False)
    assert device.num_launched_ahead > 0
    for number, (ours, theirs) in enumerate(zip(late, plain, strict=True)):
        errors = [event for event in ours if isinstance(event, EngineError)]
        if number == 2:
            assert len(errors) == 1
            assert ours[-1] is errors[0]
        else:
            assert not errors
            assert bill(completions(ours), waiting[number]) == bill(completions(theirs), waiting[number])


@pytest.mark.parametrize("fail", [fail_at_launch, fail_by_numbers])
@pytest.mark.parametrize("seed", range(8))
def test_the_failing_job_ends_alone_and_the_others_have_the_plain_answers(
    fail: Fail, seed: int, checkpoints: Checkpoints
) -> None:
    check(checkpoints("llama"), seed, fail)
