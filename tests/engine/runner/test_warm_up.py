"""Before the first request the common shapes of steps are compiled and captured, and leave nothing in the cache."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.models.load import load_model
from engine.protocol.types import Branch
from engine.runner.piecewise_gpu import SIZES
from engine.runner.warm_up import StepShape, list_shapes, warm_up
from engine.speculation.control.controller import FixedController
from engine.speculation.drafter import Drafter
from engine.speculation.drafters.draft_model import DraftModel
from engine.speculation.drafters.eagle import load_eagle
from tests.engine.conftest import Checkpoints
from tests.engine.gpu import EmulatedGraph, EmulatedPool, emulate_gpu
from tests.engine.helpers import SMALL, Harness, generate
from tests.engine.runner.test_gpu_engine import agree
from tests.engine.speculation.heads import Recorder, eagle_parts, save_head
from tests.long import mostly_long

REQUEST = generate(
    range(3, 240), [Branch(1, key, 12) for key in range(4)], temperature=1.0, ignore_eos=True, request_id="r"
)


def test_the_shapes_are_prompts_and_all_common_batch_sizes() -> None:
    shapes = list_shapes(256, 2048, 100_000)
    prompts = [shape for shape in shapes if shape.num_new > 1]
    decoding = [shape for shape in shapes if shape.num_new == 1]
    assert shapes == prompts + decoding
    assert [shape.num_new for shape in prompts] == [size for size in SIZES if size >= 32] + [2048]
    assert all(shape == StepShape(1, shape.num_new, shape.num_new) for shape in prompts)
    assert {shape.num_sequences for shape in decoding} == {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256}
    assert {shape.context for shape in decoding} == {256, 2048}


@pytest.mark.parametrize(
    ("max_running", "step_tokens", "context"), [(1, 1, 1), (5, 2048, 100), (300, 64, 300), (4, 10, 5000)]
)
def test_shapes_stay_within_the_limits_and_include_the_largest_batch(
    max_running: int, step_tokens: int, context: int
) -> None:
    shapes = list_shapes(max_running, step_tokens, context)
    assert len(set(shapes)) == len(shapes)
    assert all(shape.num_sequences * shape.num_new <= step_tokens for shape in shapes)
    assert all(shape.num_new <= shape.context <= context for shape in shapes)
    assert max(shape.num_sequences for shape in shapes) == min(max_running, step_tokens)


@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    mostly_long(
        [
            ("qwen3", "auto"),
            ("qwen3_window", "int8"),
            ("qwen3", "fp8"),
            ("qwen3_moe", "auto"),
            ("falcon_h1", "auto"),
            ("mamba2", "auto"),
        ],
        every=2,
    ),
)
def test_a_warm_engine_captures_nothing_for_common_shapes_and_samples_the_same(
    kind: str,
    kv_dtype: str,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = replace(SMALL, max_running=4, kv_dtype=kv_dtype)
    expected = Harness(checkpoints(kind), replace(options, device="cpu")).complete(REQUEST)
    emulate_gpu(monkeypatch)
    harness = Harness(checkpoints(kind), options)
    core = harness.core
    with caplog.at_level(logging.WARNING):
        warm_up(core.model.decoder, core.cache, core.runner.forward, name="m", step_tokens=options.step_tokens)
    assert "all shapes are ready" in caplog.text
    assert not core.cache.data.float().any()
    assert not np.any(core.cache.page_table)
    core.check_invariants()
    captured = EmulatedGraph.captured
    num_sampling = 3  # sampling after 1, 2 and 4 hidden states, which is captured for every model
    assert (captured > num_sampling) == (kind != "qwen3_moe")
    agree(harness.complete(REQUEST), expected, checkpoints(kind), kv_dtype, [REQUEST])
    assert EmulatedGraph.captured - captured <= 1


def test_a_loaded_engine_on_a_gpu_is_warm_and_one_on_a_cpu_runs_nothing(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(SMALL, max_running=2, step_tokens=64)
    core = Harness(checkpoints("qwen3"), options).core
    no_forward: Any = None
    warm_up(core.model.decoder, core.cache, no_forward, name="m", step_tokens=64)
    emulate_gpu(monkeypatch)
    monkeypatch.setattr("engine.core.step.warm_up", warm_up)
    Harness(checkpoints("qwen3"), options)
    assert EmulatedGraph.captured >= 2


@pytest.mark.parametrize("kind", ["eagle", "draft_model"])
def test_a_warm_drafter_captures_nothing_and_drafts_the_same(
    kind: str,
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Steps that verify trees are warm too, and the drafts of a drafter that was warmed up are those of a cold one."""
    folder, options, drafted, captured = checkpoints("qwen3"), replace(SMALL, max_running=4), [], []
    emulate_gpu(monkeypatch)
    for is_warm in (False, True):
        harness = Harness(folder, options)
        core = harness.core
        config = core.model.decoder.device_config
        if kind == "eagle":
            drafter: Drafter = load_eagle(save_head(tmp_path, *eagle_parts()), core.model.decoder)
        else:
            drafter = DraftModel(load_model(checkpoints("mistral"), lambda _: 256, config), context=256)
        recorder = Recorder(drafter)
        core.start_speculation(recorder, FixedController(3, 8))
        if is_warm:
            with caplog.at_level(logging.WARNING):
                steps = {"name": "m", "step_tokens": options.step_tokens}
                warm_up(core.model.decoder, core.cache, core.runner.forward, **steps, drafter=recorder)
            assert not core.cache.data.float().any()
        before = EmulatedPool.captured
        harness.complete(REQUEST)
        captured.append(EmulatedPool.captured - before)
        drafted.append([(one.draft.tokens, one.draft.parents) for one in recorder.asked])
    assert "all shapes are ready" in caplog.text
    assert drafted[0] == drafted[1]
    assert len(drafted[0]) > 10
    assert captured[0] > captured[1] == 0


def test_steps_that_verify_drafts_are_warm() -> None:
    shapes = list_shapes(4, 40, 300, has_drafts=True)
    drafts = [shape for shape in shapes if 1 < shape.num_new < 20]
    assert {(shape.num_new, shape.is_tree) for shape in drafts} == {(3, False), (5, False), (9, True), (17, True)}
    assert max(shape.num_sequences for shape in drafts) == 4
    assert all(shape.num_sequences * shape.num_new <= 40 for shape in drafts)
