"""Decoding steps that keep what they have in common: the same batches, noise and results as if all was made anew."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.core import step
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion
from engine.runner import batch as batch_module
from engine.runner.batch import DecodeRows, ScheduledSequence
from engine.runner.decode_batch import find_decode_batch
from engine.runner.sample_step import SamplePlan, SampleRequest
from engine.scheduler.draft import EMPTY_DRAFT
from engine.scheduler.sequence import GenerateSequence
from tests.engine.conftest import Checkpoints
from tests.engine.gpu import emulate_gpu
from tests.engine.helpers import Harness, generate
from tests.seeds import shift

SCARCE = EngineOptions(kv_tokens=272, max_running=12, step_tokens=64)
"""Memory for a part of the branches, so that some are preempted and start again."""
SAMPLING: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True},  # for these alone memory is scarce, whatever the weights
    {"temperature": 0.0},
    {"logprobs": 2, "top_p": 0.9},
    {"repetition_penalty": 1.3, "min_tokens": 5, "stop_token_ids": (7, 9)},
    {"stop": ("e",), "min_p": 0.05},
    {"top_k": 5, "prompt_logprobs": 1},
)


def run(folder: Path) -> tuple[list[list[Completion]], int]:
    """Run requests that arrive at different times; return their completions and the number of preemptions."""
    harness, dice = Harness(folder, SCARCE), random.Random(shift(1))
    received = []
    for number in range(12):
        prompt = dice.choices(range(3, 360), k=dice.choice((5, 33, 70)))
        branches = [Branch(number, key, dice.randint(20, 80)) for key in range(3)]
        received.append(harness.submit(generate(prompt, branches, **SAMPLING[number % len(SAMPLING)])))
        for _ in range(dice.randint(0, 5)):
            if harness.core.has_work:
                harness.core.step()
    harness.run()
    completed = [[event for event in events if isinstance(event, Completion)] for events in received]
    ordered = [sorted(some, key=lambda one: one.index) for some in completed]
    assert all(len(some) == 3 for some in ordered)
    return ordered, harness.core.stats.preemptions


@pytest.mark.parametrize("device", ["cpu", "emulated gpu"])
def test_results_are_the_same_bits_as_if_every_step_was_made_anew(
    device: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "cpu":
        emulate_gpu(monkeypatch)
    ours, num_preemptions = run(checkpoints("llama"))
    assert num_preemptions
    monkeypatch.setattr(step, "find_decode_batch", lambda *_: None)
    anew, _ = run(checkpoints("llama"))
    assert ours == anew


def test_batches_and_plans_are_those_made_anew(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = batch_module.build_batch, list[tuple[int, bool]]()
    last: list[Any] = [None]

    def find(entries: list[tuple[Any, int]], previous: Any) -> Any:
        found = find_really(entries, previous)
        if found is not None:
            seen.append((len(entries), found is previous))
        last[0] = found
        return found

    def build(scheduled: Any, cache: Any, attention: Any, rows: DecodeRows | None = None) -> Any:
        made = real(scheduled, cache, attention, rows)
        if rows is not None:
            decode = last[0]
            check_same(made, real([ScheduledSequence(*entry) for entry in decode.entries], cache, attention))
            check_plan(decode.samples, decode.scheduled)
        return made

    find_really = find_decode_batch
    monkeypatch.setattr(step, "find_decode_batch", find)
    monkeypatch.setattr(step, "build_batch", build)
    run(checkpoints("llama"))
    assert sum(is_kept for _, is_kept in seen) > 30
    assert sum(not is_kept for _, is_kept in seen) > 10


def check_same(made: Any, anew: Any) -> None:
    (batch, rows, order), (expected, expected_rows, expected_order) = made, anew
    assert order == expected_order
    assert torch.equal(batch.tokens, expected.tokens)
    assert torch.equal(batch.positions, expected.positions)
    for name in ("page_table", "query_lens", "seq_lens"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(expected_rows, name))


def check_plan(plan: SamplePlan, scheduled: list[ScheduledSequence]) -> None:
    sequences = [sequence for sequence, *_ in scheduled if isinstance(sequence, GenerateSequence)]
    anew = SamplePlan([SampleRequest(sequence, EMPTY_DRAFT, row) for row, sequence in enumerate(sequences)])
    assert (plan.rows, plan.num_logprobs) == (anew.rows, anew.num_logprobs)
    for ours, expected in zip((*plan.params, *plan.noise_keys()), (*anew.params, *anew.noise_keys()), strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert plan.noise_keys().position.tolist() == [len(sequence.tokens) for sequence in sequences]
