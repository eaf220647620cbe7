"""On a GPU, EAGLE's trees grow on the device and equal the host's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import Event
from engine.speculation.drafters.device_trees import EagleTrees
from tests.engine.conftest import Checkpoints
from tests.engine.gpu import EmulatedGraph, emulate_gpu
from tests.engine.helpers import SMALL, Harness, generate
from tests.engine.speculation import heads
from tests.engine.speculation.drafters.test_eagle import SHAPES, Reference, guessing
from tests.engine.speculation.heads import Asked, assert_same_drafts, bound_drafts, eagle_parts, save_head
from tests.engine.speculation.test_exact import answers, completions, requests, same
from tests.engine.ties import assert_same_tokens
from tests.long import mostly_long, mostly_long_grid


def bound_trees(folder: Path, tensors: dict[str, Tensor], made: Sequence[Asked]) -> float:
    """Return the bound on the logarithm of a draft token's probability in float32, at the trees' last tokens."""
    return bound_drafts(
        lambda one: Reference(folder, tensors).logits(one.tokens, one.draft.path(len(one.draft) - 1)[:-1]),
        [one for one in made if one.draft != EMPTY_DRAFT],
    )


def texts(heard: list[list[Event]]) -> list[tuple[int, ...]]:
    return [event.token_ids for events in heard for event in events if isinstance(event, Completion)]


@pytest.mark.parametrize(("shape", "law"), mostly_long_grid(list(SHAPES), ["greedy", "plain", "filters"], every=5))
def test_the_trees_are_those_that_the_host_grows(
    checkpoints: Checkpoints, tmp_path: Path, law: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (config, tensors) = checkpoints("qwen3"), eagle_parts()
    head, options = save_head(tmp_path, config, tensors), replace(SMALL, step_tokens=32, page_size=8)
    asked = [replace(request, branches=request.branches[:1]) for request in requests(law)]
    harness, on_cpu = guessing(folder, head, SHAPES[shape], options)
    plain = texts(answers(harness, asked))
    emulate_gpu(monkeypatch)
    harness, on_gpu = guessing(folder, head, SHAPES[shape], options)
    assert_same_tokens(folder, asked, texts(answers(harness, asked)), plain)
    assert EmulatedGraph.replayed > 20
    assert len(on_cpu.asked) > 20
    bound = bound_trees(folder, tensors, on_cpu.asked)
    assert_same_drafts(on_gpu.asked, on_cpu.asked, bound, Reference(folder, tensors))


@pytest.mark.parametrize(("shape", "law"), mostly_long_grid(list(SHAPES), ["penalties", "limits", "stops"], every=5))
def test_every_kind_of_request_is_answered_as_without_drafts(
    checkpoints: Checkpoints, tmp_path: Path, law: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits processors too, with which no level is captured."""
    folder, asked = checkpoints("qwen3"), requests(law)
    plain = completions(answers(Harness(folder), asked))
    emulate_gpu(monkeypatch)
    harness, recorder = guessing(folder, save_head(tmp_path, *eagle_parts()), SHAPES[shape])
    same(asked, completions(answers(harness, asked)), plain, folder)
    assert sum(one.draft != EMPTY_DRAFT for one in recorder.asked) > 0.8 * len(recorder.asked) > 10


@pytest.mark.parametrize(
    ("kv_dtype", "shape"),
    mostly_long([("auto", "tree"), ("int8", "chain"), ("fp8", "tree"), ("int4", "tree")], every=4),
)
def test_branches_that_share_pages_are_answered_exactly(
    checkpoints: Checkpoints, tmp_path: Path, shape: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks, preemption, and score requests; each draft is copied to the host once."""
    folder = checkpoints("qwen3_wide" if kv_dtype == "int4" else "qwen3")
    asked = [replace(request, pin_key="a") for request in requests("plain", 40)]
    plain = completions(answers(Harness(folder, replace(SMALL, kv_dtype=kv_dtype)), asked))
    emulate_gpu(monkeypatch)
    if kv_dtype == "int4":
        monkeypatch.setattr(heads, "HEAD_DIM", 32)
    tight = EngineOptions(kv_tokens=160, page_size=8, max_running=6, step_tokens=24, kv_dtype=kv_dtype)
    harness, recorder = guessing(folder, save_head(tmp_path, *eagle_parts()), SHAPES[shape], tight)
    copies: list[None] = []
    drafts: list[int] = []
    copy, draft = torch.Tensor.cpu, EagleTrees.__call__

    def counted_draft(*args: Any) -> list[Draft]:
        before = len(copies)
        found = draft(*args)
        drafts.append(len(copies) - before)
        return found

    def counted_copy(tensor: Tensor) -> Tensor:
        copies.append(None)
        return copy(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted_copy)
    monkeypatch.setattr(EagleTrees, "__call__", counted_draft)
    same(asked, completions(answers(harness, asked)), plain, folder, kv_dtype)
    assert harness.core.stats.preemptions > 0
    assert set(drafts) == {1}
    assert sum(one.draft != EMPTY_DRAFT for one in recorder.asked) > 0.8 * len(recorder.asked)


def test_more_branches_than_draft_together_get_the_same_drafts(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (config, tensors), made = checkpoints("qwen3"), eagle_parts(), []
    head = save_head(tmp_path, config, tensors)
    emulate_gpu(monkeypatch)
    for most in (64, 2):
        monkeypatch.setattr("engine.speculation.drafters.device_trees.MAX_BRANCHES", most)
        monkeypatch.setattr("engine.speculation.drafters.device_levels.MAX_BRANCHES", most)
        harness, recorder = guessing(folder, head, SHAPES["tree"])
        answers(harness, requests("plain"))
        made.append(recorder.asked)
    assert_same_drafts(*made, bound_trees(folder, tensors, made[0]))


def test_a_branch_may_end_the_context_while_another_drafts_on(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints("qwen3")
    context = Harness(folder, SMALL).core.model.info.context
    prompts = [[5, *range(3, 3 + length)] for length in (context - 12, 20)]
    asked = [
        generate(
            prompt,
            [Branch(1, 0, 11 if len(prompt) > 50 else 40)],
            request_id=str(len(prompt)),
            ignore_eos=True,
            temperature=1.0,
        )
        for prompt in prompts
    ]
    emulate_gpu(monkeypatch)
    plain = texts(answers(Harness(folder, SMALL), asked))
    harness, recorder = guessing(folder, save_head(tmp_path, *eagle_parts()), (6, 12))
    assert_same_tokens(folder, asked, texts(answers(harness, asked)), plain)
    assert max(len(one.tokens) + one.wish.depth for one in recorder.asked) >= context - 2
