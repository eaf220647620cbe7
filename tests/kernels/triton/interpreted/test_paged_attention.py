"""Paged attention equals float64 for all tiles, types and masks, and reads only valid memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import InterpreterError

from kernels.attention.paged import reference
from kernels.common import attention_schedule
from kernels.common.int4 import INT4
from kernels.triton import paged_attention as module
from tests.closeness import assert_rounded, attention_bound, unit_bound
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.interpreted.steps import Step, random_tree
from tests.kernels.triton.planted import planted
from tests.long import mostly_long, mostly_long_grid

STEPS: dict[str, Callable[..., Step]] = {
    "decode at the edges of pages": lambda **kind: Step([1, 15, 16, 17, 64, 65], [1] * 6, **kind),
    "decode of a long context, cut": lambda **kind: Step([300], [1], **kind),
    "a chunk of a prompt and a token": lambda **kind: Step([83, 17], [23, 1], **kind),
    "queries that see nothing of a chunk": lambda **kind: Step([70, 129], [10, 1], **kind),
    "a shared prefix": lambda **kind: Step([70, 81, 97], [1, 2, 1], shared=4, **kind),
    "trees": lambda **kind: Step([75, 40, 9], [11, 1, 9], trees={0: random_tree(11, 0), 2: random_tree(9, 1)}, **kind),
}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_schedule, "MIN_KEYS", 64)


def check(step: Step, launch: Callable[..., Any] = module.launch) -> None:
    ours = launch(step.q.to(DEVICE), step.cache, step.work(), **step.options()).cpu()
    assert ours.dtype == step.q_type
    first = 0 if step.num_values is None else step.dim - step.num_values
    ours, expected = ours[..., first:], step.expected()[..., first:]
    if step.q_type == torch.float32:
        k, v = step.exact.nan_to_num()
        assert_rounded(ours, expected, attention_bound(step.q, k, v, scale=step.scale, keys=max(step.contexts)))
    else:
        rounding = unit_bound(step.q_type)
        torch.testing.assert_close(ours.double(), expected, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_every_kind_equal_float64(name: str) -> None:
    check(STEPS[name]())
    check(STEPS[name](), reference)


@pytest.mark.parametrize("name", ["a chunk of a prompt and a token", "trees"])
@pytest.mark.parametrize("window", [1, 5, 40])
def test_windows_hide_earlier_keys(name: str, window: int) -> None:
    check(STEPS[name](window=window))
    check(STEPS[name](window=window), reference)


@pytest.mark.parametrize("name", mostly_long(STEPS, every=2))
def test_a_sink_counts_once_for_each_query(name: str) -> None:
    """It is added where one tile computes the result, and where partial results are merged."""
    check(STEPS[name](has_sinks=True))
    check(STEPS[name](has_sinks=True), reference)


def test_a_sink_counts_beside_windows_and_quantized_keys() -> None:
    check(STEPS["a chunk of a prompt and a token"](has_sinks=True, window=5))
    check(STEPS["trees"](has_sinks=True, window=5, q_type=torch.bfloat16, kv_type=torch.int8))
    check(STEPS["decode of a long context, cut"](has_sinks=True, window=40, dim=64, q_type=torch.float16, kv_type=INT4))


def test_a_sink_far_above_or_below_all_scores_is_exact() -> None:
    for name in ("a shared prefix", "decode at the edges of pages"):
        step = STEPS[name](has_sinks=True)
        assert step.sinks is not None
        step.sinks[:] = torch.tensor([-300.0, 200.0, -40.0, 30.0])
        check(step)


@pytest.mark.parametrize(
    ("q_type", "kv_type"),
    mostly_long(
        [
            (torch.float16, torch.float16),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float8_e4m3fn),
            (torch.bfloat16, torch.int8),
            (torch.float16, torch.int8),
        ],
        every=2,
    ),
    ids=str,
)
def test_keys_of_every_type_equal_float64(q_type: torch.dtype, kv_type: torch.dtype) -> None:
    check(STEPS["a shared prefix"](q_type=q_type, kv_type=kv_type, softcap=2.0))
    check(STEPS["trees"](q_type=q_type, kv_type=kv_type))


@pytest.mark.parametrize(
    ("name", "dim"),
    mostly_long_grid(["a shared prefix", "trees", "a chunk of a prompt and a token"], [32, 64, 96, 128], every=5),
)
def test_keys_of_4_bits_equal_float64(name: str, dim: int) -> None:
    check(STEPS[name](q_type=torch.bfloat16, kv_type=INT4, dim=dim, scale=dim**-0.5))
    check(STEPS[name](q_type=torch.bfloat16, kv_type=INT4, dim=dim, scale=dim**-0.5), reference)


LATENTS = {40: 32, 72: 50, 96: 64, 32: 24, 100: 80}
"""Sizes of vectors, and how many of their last numbers are values: of two parts, or of one."""


@pytest.mark.parametrize(("name", "dim"), mostly_long_grid(STEPS, LATENTS, every=11))
def test_latents_equal_float64(name: str, dim: int) -> None:
    kind = {"is_latent": True, "group": 3, "dim": dim, "num_values": LATENTS[dim], "scale": dim**-0.5}
    check(STEPS[name](**kind))
    check(STEPS[name](**kind), reference)


@pytest.mark.parametrize(
    ("kv_type", "name", "dim"),
    mostly_long_grid(
        [torch.int8, torch.float8_e4m3fn, torch.bfloat16, INT4], ["a shared prefix", "trees"], [96, 224, 64], every=7
    ),
    ids=str,
)
def test_latents_of_every_type_equal_float64(kv_type: torch.dtype, name: str, dim: int) -> None:
    kind = {"q_type": torch.bfloat16, "kv_type": kv_type, "is_latent": True, "dim": dim, "scale": dim**-0.5}
    for num_values in (None, dim // 2):
        check(STEPS[name](**kind, window=40, num_values=num_values))
    check(STEPS[name](**kind), reference)


def test_the_vectors_of_deepseek_are_read_in_two_parts() -> None:
    step = STEPS["a chunk of a prompt and a token"](
        q_type=torch.bfloat16,
        kv_type=torch.int8,
        is_latent=True,
        group=4,
        kv_heads=1,
        dim=576,
        num_values=512,
        scale=0.05,
    )
    assert module.split_vector(step.cache, 576) == (512, 64)
    check(step)


@pytest.mark.parametrize(("group", "dim", "page"), [(1, 64, 1), (3, 80, 7), (7, 8, 32), (24, 16, 16)])
def test_sizes_that_no_block_divides_equal_float64(group: int, dim: int, page: int) -> None:
    check(Step([40, 9], [1, 3], group=group, dim=dim, page=page, scale=dim**-0.5))


def test_queries_too_large_for_float16_work_with_quantized_keys() -> None:
    step = STEPS["decode of a long context, cut"](q_type=torch.bfloat16, kv_type=torch.int8, scale=1e-6)
    step.q *= 1e6
    check(step)


def test_padding_is_skipped() -> None:
    """The tensors are larger than the step, as in a captured graph."""
    step = Step([70, 81, 97, 70, 66], [1] * 5, shared=4)
    work = step.work()
    assert (work.low[:, attention_schedule.COUNT] == 0).any()
    assert (work.merged[:, 2] == 0).any()
    check(step)


BUGS = {
    "the mask is off by one": ("key[None, :] <= position[:, None]", "key[None, :] < position[:, None]"),
    "the window is off by one": ("position[:, None] - window", "position[:, None] - window - 1"),
    "sums are rescaled the wrong way": (
        "kept = tl.exp2(top - base)\n    total",
        "kept = tl.exp2(base - top)\n    total",
    ),
    "partial sums are natural logarithms": ("top + tl.log2(total)", "top + tl.log(total)"),
    "the merge is to base e": ("shares = tl.exp2(", "shares = tl.exp("),
    "heads are taken in turn": ("head * GROUP + line % GROUP", "head + line % GROUP * (HEADS // GROUP)"),
    "the place in the page is forgotten": ("* PAGE + read % PAGE", "* PAGE + read % PAGE // 2 * 2"),
    "reads are not clamped": ("tl.minimum(key, end - 1) if MASKED else key", "key"),
    "a tree's bits are shifted": ("(behind & 31)", "(behind + 1 & 31)"),
    "the scales of values are forgotten": ("weights *= tl.load(value_scales + slot)[None, :]", "pass"),
    "the queries' largest number is forgotten": ("factor *= largest", "pass"),
    "each part counts the sink": ("tl.where(partial < 0, tl.exp2(sink - top), 0.0)", "tl.exp2(sink - top)"),
    "a tile forgets the sink": ("total += tl.where(partial < 0, tl.exp2(sink - top), 0.0)", "pass"),
    "the merge forgets the sink": ("top = tl.load(sinks + head).to(tl.float32) * _LOG2_E", "top -= 1000.0"),
    "the first part is read as the last": ("DIM, 0, first, REST, KEYS", "DIM, DIM - first, first, REST, KEYS"),
    "the results are those of other numbers": ("dim = first + tl.arange(0, WIDE)", "dim = tl.arange(0, WIDE)"),
    "a latent's scale is forgotten": ("weights *= tl.load(value_scales + slot)[None, :]", "weights = weights"),
    "sinks are taken by key-value head": ("tl.load(sinks + query_head)", "tl.load(sinks + head)"),
}


def check_all(launch: Callable[..., Any]) -> None:
    check(STEPS["a shared prefix"](q_type=torch.float16, kv_type=torch.int8), launch)
    check(STEPS["trees"](window=5), launch)
    check(STEPS["a shared prefix"](has_sinks=True), launch)
    check(STEPS["decode at the edges of pages"](has_sinks=True), launch)
    check(
        STEPS["a shared prefix"](is_latent=True, dim=40, num_values=32, q_type=torch.float16, kv_type=torch.int8),
        launch,
    )


@pytest.mark.skipif(DEVICE != "cpu", reason="some of them read what is not theirs")
@pytest.mark.long
@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_detected(name: str, tmp_path: Path) -> None:
    broken = planted("paged_attention", *BUGS[name], "paged_attention", tmp_path)
    with pytest.raises((AssertionError, InterpreterError)):
        check_all(broken.launch)
