"""The last layer is computed for the rows that are read only, with the same results as for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from engine.attention.plan import AttentionMetadata
from engine.core import step
from engine.models.interface import Batch
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, ScoreItem
from engine.runner.forward_cpu import CpuForward
from engine.speculation.control.controller import FixedController
from engine.speculation.drafters.ngram import NgramDrafter
from tests.engine.conftest import Checkpoints
from tests.engine.exact import float32_loss, gap
from tests.engine.helpers import Harness, generate, score
from tests.engine.models.test_models import random_tokens

OPTIONS = EngineOptions(kv_tokens=8192, max_running=16, step_tokens=160)
LENGTHS = (240, 2, 17, 40, 129, 200)
"""Prompt lengths: longer than a step, short enough for recorded kernels, and too long for these."""
_Answers = list[list[tuple[tuple[int, ...], float]]]


@pytest.mark.parametrize("guesses", [False, True], ids=["plain", "guessing"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_generation_is_the_same_as_with_all_rows_computed(
    checkpoints: Checkpoints, kind: str, guesses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = spied(monkeypatch)
    found = answers(checkpoints(kind), guesses)
    assert any(0 < rows < tokens for tokens, rows in read)
    assert any(rows == 0 for _, rows in read)  # the first chunk of a prompt
    monkeypatch.setattr(step, "rows_needed", lambda work: None)
    bound = 12 * gap(checkpoints(kind))  # 12 tokens per branch
    for ours, plain in zip(found, answers(checkpoints(kind), guesses), strict=True):
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in plain]
        assert [logprob for _, logprob in ours] == pytest.approx([logprob for _, logprob in plain], abs=bound)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_scores_are_the_same_as_with_all_rows_computed(
    checkpoints: Checkpoints, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = spied(monkeypatch)
    request = score(
        *(ScoreItem((random_tokens(size, size), random_tokens(3, 1)), (1, 0)) for size in LENGTHS), token_ids=(3, 1, 7)
    )
    found = Harness(checkpoints(kind), OPTIONS).score(request)
    assert any(0 < rows < tokens for tokens, rows in read)
    monkeypatch.setattr(step, "rows_needed", lambda work: None)
    for ours, plain in zip(found, Harness(checkpoints(kind), OPTIONS).score(request), strict=True):
        assert ours.values is not None
        assert plain.values is not None
        for some, others in zip(ours.values, plain.values, strict=True):
            assert some == pytest.approx(others, abs=2 * float32_loss(checkpoints(kind)).logit)


def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the number of tokens and of rows read, of each step that reads only some rows."""
    read: list[tuple[int, int]] = []
    call = CpuForward.__call__

    def spy(
        self: CpuForward,
        batch: Batch,
        rows: AttentionMetadata,
        chosen: Sequence[int] | None = None,
        layers: frozenset[int] = frozenset(),
    ) -> Tensor:
        if chosen is not None:
            read.append((len(batch.tokens), len(chosen)))
        return call(self, batch, rows, chosen, layers)

    monkeypatch.setattr(CpuForward, "__call__", spy)
    return read


def answers(folder: Path, guesses: bool) -> _Answers:
    harness = Harness(folder, OPTIONS)
    if guesses:
        harness.core.start_speculation(NgramDrafter(), FixedController(3, 3))
    events = []
    for size, law in zip(LENGTHS, [{}, {"temperature": 0.0}, {"logprobs": 2}] * 2, strict=True):
        branches = [Branch(size, key, 12) for key in range(2)]
        events.append(harness.submit(generate(random_tokens(size, size), branches, ignore_eos=True, **law)))
        if size == LENGTHS[0]:
            harness.core.step()
    harness.run()
    ordered = [sorted(some, key=lambda one: one.index) for some in events]  # type: ignore[union-attr]
    return [[(one.token_ids, one.logprob) for one in some] for some in ordered]  # type: ignore[union-attr]
