"""Samples of the fused sampler's recorded kernels equal those of the general sampler."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion
from engine.runner.fused_sampler_cpu import FusedCpuSampler
from engine.speculation.control.controller import FixedController
from engine.speculation.drafters.ngram import NgramDrafter
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate
from tests.engine.models.test_models import random_tokens

OPTIONS = EngineOptions(kv_tokens=8192, max_running=6, step_tokens=64)
LAWS: list[dict[str, float]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "logprobs": 3},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 1.1, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "logprobs": 0},
]


@pytest.mark.parametrize("guesses", [None, (1, 1), (3, 3), (2, 5)], ids=["plain", "one", "three", "trees"])
def test_fused_samples_equal_those_of_the_general_sampler(
    checkpoints: Checkpoints, guesses: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Branches with different sampling parameters start and end at different times, so that each row of the page table
    has several parameters in turn."""
    num_calls = 0
    sample = FusedCpuSampler.sample

    def counted(*arguments: object) -> object:
        nonlocal num_calls
        num_calls += 1
        return sample(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FusedCpuSampler, "sample", counted)
    found = answers(checkpoints("qwen3"), guesses)
    assert num_calls > 20
    monkeypatch.setattr(FusedCpuSampler, "sample", lambda *_: None)
    assert answers(checkpoints("qwen3"), guesses) == found


def answers(folder: Path, guesses: tuple[int, int] | None) -> list[list[Completion]]:
    harness = Harness(folder, OPTIONS)
    if guesses:
        harness.core.start_speculation(NgramDrafter(), FixedController(*guesses))
    prompt = random_tokens(7, 5) * 3
    requests = [
        harness.submit(generate(prompt, [Branch(number, key, 9 + 5 * key) for key in range(2)], **law))
        for number, law in enumerate(LAWS * 2)
    ]
    harness.run()
    return [
        sorted((one for one in events if isinstance(one, Completion)), key=lambda one: one.index) for events in requests
    ]
