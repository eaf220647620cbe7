"""No two caches, forward passes or sets of graphs are alive at once: a GPU has no room for both."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache.paged_kv import KVCache
from engine.core.recovery import free_failed_step
from engine.protocol.types import Branch, Completion
from engine.runner import forward as runner
from engine.speculation.control.controller import FixedController
from tests.engine.conftest import Checkpoints
from tests.engine.gpu import emulate_gpu
from tests.engine.helpers import SMALL, Harness, generate
from tests.engine.runner.test_gpu_engine import drafter
from tests.engine.speculation.stub_drafters import Oracle
from tests.long import mostly_long_grid


class AliveAtOnce:
    """Counts the objects of each kind that are alive while another one is created."""

    def __init__(self) -> None:
        self._alive: dict[str, list[weakref.ref[Any]]] = {}
        self.most: dict[str, int] = {}
        self.created: dict[str, int] = {}

    def add(self, kind: str, made: object) -> None:
        self.created[kind] = self.created.get(kind, 0) + 1
        self._alive.setdefault(kind, []).append(weakref.ref(made))

    def count(self, kind: str) -> None:
        """Count one more than are alive: the one that is about to be created."""
        alive = sum(one() is not None for one in self._alive.get(kind, ()))
        self.most[kind] = max(self.most.get(kind, 0), alive + 1)


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[AliveAtOnce]:
    """Count caches and forward passes, without the collector, which a GPU's memory must not have to wait for."""
    counts = AliveAtOnce()
    create, forward = KVCache.__init__, runner.create_forward

    def create_cache(self: KVCache, **sizes: Any) -> None:
        kind = "cache of the target" if "max_pinned" in sizes else "cache of the drafter"
        counts.count(kind)
        create(self, **sizes)
        counts.add(kind, self.data)

    def create_forward(model: Any, cache: KVCache, **options: Any) -> Any:
        kind = f"forward of {id(model)}"
        counts.count(kind)
        made = forward(model, cache, **options)
        counts.add(kind, made)
        return made

    monkeypatch.setattr(KVCache, "__init__", create_cache)
    for module in ("engine.core.step", "engine.speculation.drafters.draft_model"):
        monkeypatch.setattr(f"{module}.create_forward", create_forward)
    gc.collect()
    gc.disable()
    yield counts
    gc.enable()


def fail_twice(harness: Harness, patch: pytest.MonkeyPatch) -> None:
    """Make the third and the sixth step fail while their tensors are alive."""
    build: Callable[..., Any] = harness.core._append_sampled_tokens
    steps = iter(range(1000))

    def append(*arguments: Any) -> Any:
        if next(steps) in (2, 5):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build(*arguments)

    patch.setattr(harness.core, "_append_sampled_tokens", append)


@pytest.mark.parametrize(
    ("kind", "emulated"),
    mostly_long_grid(["off", "ngram", "draft_model", "medusa", "eagle"], [False, True], every=3),
    ids=str,
)
def test_a_failed_step_frees_before_it_allocates(
    kind: str,
    emulated: bool,
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alive: AliveAtOnce,
) -> None:
    if emulated:
        emulate_gpu(monkeypatch)
    draft = "off" if kind == "off" else drafter(kind, checkpoints, tmp_path)
    harness = Harness(checkpoints("qwen3"), replace(SMALL, draft=draft))
    fail_twice(harness, monkeypatch)
    request = generate(range(3, 40), [Branch(1, key, 12) for key in range(3)], temperature=1.0, ignore_eos=True)
    assert harness.complete(request) == []  # the second failure, alone, blames it
    assert [type(one) for one in harness.complete(request)] == [Completion] * 3
    assert set(alive.most.values()) == {1}
    assert max(alive.created.values()) >= 3


def test_other_drafters_take_the_place_of_the_old_cache(checkpoints: Checkpoints, alive: AliveAtOnce) -> None:
    harness = Harness(checkpoints("qwen3"))
    for _ in range(2):
        harness.core.start_speculation(Oracle({}, 360, right=1.0), FixedController(2, 2))
    assert set(alive.most.values()) == {1}
    assert max(alive.created.values()) == 3


def test_no_traceback_keeps_the_tensors_of_a_failed_step() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def fail(depth: int) -> None:
        hidden = torch.zeros(8)
        kept.append(weakref.ref(hidden))
        try:
            if depth:
                fail(depth - 1)
            raise ValueError("first")
        except ValueError as error:
            raise RuntimeError("second") from error

    try:
        fail(2)
    except RuntimeError as error:
        free_failed_step(error)
        assert [one() for one in kept] == [None] * 3
