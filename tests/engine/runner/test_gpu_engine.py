"""The engine's GPU path, emulated on the CPU by the kernels' references: the same tokens as the CPU path.

With a GPU (``pytest -m gpu``) it is also run there."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.device import CPU, DeviceConfig, select_device
from engine.models.decoder import Decoder
from engine.models.feed_forward import Experts, SharedExperts, has_grouped_products
from engine.models.gemma4 import ExpertsBesideMlp
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, EngineError, GenerateRequest, ScoreItem
from engine.runner.graph_pool import pad_num_tokens
from engine.speculation.control.controller import FixedController
from engine.speculation.drafters import proposal, tree_draft
from tests.engine.conftest import Checkpoints
from tests.engine.exact import float32_loss, gap
from tests.engine.gpu import EMULATED_GPU, EmulatedGraph, emulate_gpu
from tests.engine.helpers import SMALL, Harness, generate, score
from tests.engine.speculation.dflash_heads import dflash_parts
from tests.engine.speculation.drafters.test_eagle import Reference
from tests.engine.speculation.drafters.test_medusa import head_logits
from tests.engine.speculation.drafters.test_mtp import Parts, save_with_layer
from tests.engine.speculation.eagle3_heads import Eagle3Reference, eagle3_parts
from tests.engine.speculation.heads import (
    Asked,
    Floats,
    Recorder,
    Target,
    bound_drafts,
    eagle_parts,
    medusa_parts,
    pair_drafts,
    save_head,
)
from tests.engine.speculation.stub_drafters import Oracle
from tests.engine.ties import assert_same_draft, count_same_tokens
from tests.long import mostly_long, mostly_long_grid
from tests.seeds import shift

_RANDOM = random.Random(shift(0))
TEXTS = [tuple(_RANDOM.choices(range(3, 360), k=size)) for size in (1, 37, 50, 16)]
CHANGED = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.2,
    "logit_bias": ((5, 2.0), (9, -50.0)),
    "min_tokens": 8,
    "logprobs": 3,
    "prompt_logprobs": 2,
}
FAMILIES = ["qwen3", "qwen3_window", "gemma2", "phi3", "llama_bias", "qwen3_moe"]
FAMILIES += ["granite", "smollm3", "olmo3", "ministral3", "gpt_oss"]
FAMILIES += ["gemma4", "gemma4_moe", "gemma4_shared", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"]
NOT_CAPTURED = "qwen3_moe", "gpt_oss", "gemma4_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"
"""Families whose experts are multiplied one by one, for whose sizes the host waits."""


def drafter(kind: str, checkpoints: Checkpoints, folder: Path) -> str:
    """Return an option that selects a drafter with random weights for the target qwen3."""
    if kind == "ngram":
        return kind
    if kind == "draft_model":
        return f"{kind}={checkpoints('llama')}"
    parts = {"medusa": medusa_parts, "eagle": eagle_parts, "eagle3": eagle3_parts, "dflash": dflash_parts}
    return f"{kind}={save_head(folder / kind, *parts[kind]())}"


def requests(size: int = 24) -> list[GenerateRequest]:
    """Return requests with all kinds of sampling parameters."""
    laws: list[dict[str, object]] = [
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.0} | CHANGED,
        {"temperature": 1.1, "top_k": 20, "min_p": 0.02} | CHANGED,
        {"temperature": 1.0},
    ]
    return [
        generate(text, [Branch(seed=row, key=key, max_tokens=size) for key in range(3)], request_id=f"r{row}", **law)
        for row, (text, law) in enumerate(zip(TEXTS, laws, strict=True))
    ]


def answers(folder: Path, options: EngineOptions = SMALL, size: int = 24) -> list[Completion]:
    harness = Harness(folder, options)
    events = [harness.submit(request) for request in requests(size)]
    harness.run()
    done = [[event for event in some if isinstance(event, Completion)] for some in events]
    return [one for some in done for one in sorted(some, key=lambda one: one.index)]


def agree(
    ours: list[Completion],
    theirs: list[Completion],
    folder: Path,
    kv_dtype: str = "auto",
    asked: Sequence[GenerateRequest] | None = None,
) -> None:
    """Check equality up to ties and roundings of different steps, at most doubled: all temperatures exceed 1/2."""
    tolerance = gap(folder, kv_dtype)
    branches = [(request, branch) for request in asked or requests() for branch in request.branches]
    for (request, branch), one, other in zip(branches, ours, theirs, strict=True):
        count = count_same_tokens(folder, request, branch, one.token_ids, other.token_ids, kv_dtype)
        if count == len(one.token_ids):
            assert one.finish_reason == other.finish_reason
            assert one.logprob == pytest.approx(other.logprob, abs=2 * count * tolerance)
        for own, plain in list(zip(one.logprobs or (), other.logprobs or (), strict=False))[:count]:
            assert own.logprob == pytest.approx(plain.logprob, abs=tolerance)


@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    mostly_long(
        [
            *((kind, "auto") for kind in FAMILIES),
            *(("qwen3", "int8"), ("qwen3_window", "fp8"), ("qwen3_wide", "int4")),
            *(("deepseek_v3", "int8"), ("deepseek_v3", "int4"), ("gemma4_shared", "fp8")),
        ],
        every=2,
    ),
)
def test_the_gpu_samples_the_same_tokens_as_the_cpu(
    kind: str, kv_dtype: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(SMALL, kv_dtype=kv_dtype)
    expected = answers(checkpoints(kind), replace(options, device="cpu"))
    emulate_gpu(monkeypatch)
    agree(answers(checkpoints(kind), options), expected, checkpoints(kind), kv_dtype)
    assert (EmulatedGraph.replayed > 0) == (kind not in NOT_CAPTURED)


@pytest.mark.parametrize("kind", mostly_long(["qwen3", "gpt_oss", "gemma4_shared", "glm4_moe_lite"], every=4))
def test_preemption_on_the_gpu_changes_no_token(
    kind: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(kv_tokens=320, max_running=8, step_tokens=64, device="cpu")
    expected = answers(checkpoints(kind), options, 40)
    emulate_gpu(monkeypatch)
    agree(answers(checkpoints(kind), options, 40), expected, checkpoints(kind))


@pytest.mark.parametrize(
    ("kv_dtype", "kind"),
    mostly_long_grid(["auto", "int8"], ["ngram", "draft_model", "medusa", "eagle", "eagle3"], every=3),
)
def test_speculation_on_the_gpu_changes_no_token(
    kind: str, kv_dtype: str, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, options = (
        checkpoints("qwen3"),
        replace(SMALL, draft=drafter(kind, checkpoints, tmp_path), kv_dtype=kv_dtype),
    )
    expected = answers(folder, replace(options, draft="off", device="cpu"))
    emulate_gpu(monkeypatch)
    agree(answers(folder, options), expected, folder, kv_dtype)


@pytest.mark.parametrize("kind", mostly_long(["gpt_oss", "gemma4_shared", "glm4_moe_lite"], every=3))
def test_trees_on_the_gpu_change_no_token_of_other_families(
    kind: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model drafts for itself, so that its attention also computes the levels of drafts."""
    folder = checkpoints(kind)
    expected = answers(folder, replace(SMALL, device="cpu"))
    emulate_gpu(monkeypatch)
    harness = Harness(folder, replace(SMALL, draft=f"draft_model={folder}"))
    harness.core.start_speculation(harness.core.runner.speculator.drafter, FixedController(3, 8))
    events = [harness.submit(request) for request in requests()]
    harness.run()
    done = [[event for event in some if isinstance(event, Completion)] for some in events]
    agree([one for some in done for one in sorted(some, key=lambda one: one.index)], expected, folder)
    tally = harness.core.speculation_stats
    assert tally is not None
    assert tally.accepted > 50


@pytest.mark.parametrize("kind", mostly_long(["deepseek_v3", "glm4_moe_lite"], every=2))
def test_layers_for_multi_token_prediction_on_the_gpu_change_no_token(
    kind: str, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_with_layer(kind, checkpoints(kind), Parts(kind, tmp_path / "layer"), tmp_path / "model")
    expected = answers(folder, replace(SMALL, device="cpu"))
    emulate_gpu(monkeypatch)
    found = answers(folder, replace(SMALL, draft="mtp"))
    agree(found, expected, folder)
    assert sum(one.drafted_tokens for one in found) > 0


def _define(kind: str, folder: Path) -> Callable[[Asked], Floats]:
    """Return the definition of the logits of a drafter's last token, computed over the whole text."""
    if kind == "medusa":
        target, tensors = Target(folder), medusa_parts()[1]
        return lambda one: head_logits(target, tensors, one)
    peer = Reference(folder, eagle_parts()[1]) if kind == "eagle" else Eagle3Reference(folder, eagle3_parts(), (1,))

    def compute(one: Asked) -> Floats:
        logits = peer.logits(one.tokens, one.draft.path(len(one.draft) - 1)[:-1])
        return logits[np.isfinite(logits)]  # a head may know some of the tokens only

    return compute


@pytest.mark.parametrize("shape", [(4, 4), (3, 8)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", mostly_long(["draft_model", "medusa", "eagle", "eagle3"], every=3))
def test_a_drafter_proposes_the_same_tokens_on_gpu_and_cpu(
    kind: str, shape: tuple[int, int], checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties do not count draft tokens there, but all before. What follows the end of a text is drafted there, too.

    No distribution is truncated, as rounding might move its border. No branches share pages: the last entry of a
    shared one is that of the branch that came first.
    """
    monkeypatch.setattr(proposal, "_CANDIDATES", 400)
    monkeypatch.setattr(tree_draft, "FLOOR", 0.0)
    wanted, folder = drafter(kind, checkpoints, tmp_path), checkpoints("qwen3")
    laws: list[dict[str, object]] = [{"temperature": 0.9}, {"temperature": 0.0} | CHANGED, {"temperature": 1.0}]
    asked = [
        generate(text, [Branch(seed=row, key=key, max_tokens=16)], request_id=name, cache_salt=name, **law)
        for row, (text, law) in enumerate(zip(TEXTS, [*laws, {"temperature": 1.1} | CHANGED], strict=True))
        for key in range(3)
        for name in [f"r{row} {key}"]
    ]

    def guesses(device: str) -> list[Asked]:
        harness = Harness(folder, replace(SMALL, device=device, draft=wanted))
        speculator = harness.core.runner.speculator
        assert speculator is not None
        recorder = Recorder(speculator.drafter)
        harness.core.start_speculation(recorder, FixedController(*shape))
        for request in asked:
            harness.submit(request)
        harness.run()
        return recorder.asked

    expected = guesses("cpu")
    emulate_gpu(monkeypatch)
    found = guesses("auto")
    assert len(expected) > 100
    if kind == "draft_model":
        bound = 2 * float32_loss(checkpoints("llama")).logit
    else:
        bound = bound_drafts(_define(kind, folder), [one for one in expected if one.draft])
    ends = Harness(folder).core.model._eos
    for ours, theirs in pair_drafts(found, expected):
        drafts = [each.draft.without(ends) for each in (ours, theirs)]
        if ours.wish.sequence.has_logits_processors:
            drafts = [draft.select([0]) if draft else draft for draft in drafts]
        assert_same_draft(*drafts, CHANGED["repetition_penalty"] * bound)


@pytest.mark.parametrize("kind", mostly_long(["draft_model", "medusa", "eagle", "eagle3"], every=2))
def test_a_drafter_computes_in_the_dtype_of_its_target(
    kind: str, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of other shapes round differently, in bfloat16 by a hundredth of a logit, which changes few samples."""
    emulate_gpu(monkeypatch, replace(EMULATED_GPU, dtype=torch.bfloat16))
    folder, wanted = checkpoints("qwen3"), drafter(kind, checkpoints, tmp_path)
    expected = answers(folder)
    harness = Harness(folder, replace(SMALL, draft=wanted))
    found = answers(folder, replace(SMALL, draft=wanted))
    same = sum(ours.token_ids == plain.token_ids for ours, plain in zip(found, expected, strict=True))
    assert harness.core.cache.data.dtype == torch.bfloat16
    assert same >= 0.75 * len(expected)
    assert sum(one.drafted_tokens for one in found) > 0


@pytest.mark.parametrize(("kind", "token_ids"), [("qwen3_classify", ()), ("gemma2", (7, 3))])
def test_the_gpu_computes_the_same_scores_as_the_cpu(
    kind: str, token_ids: tuple[int, ...], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = score(*(ScoreItem((text,), (0,)) for text in TEXTS), token_ids=token_ids)
    expected = Harness(checkpoints(kind), replace(SMALL, device="cpu")).score(asked)
    emulate_gpu(monkeypatch)
    for ours, theirs in zip(Harness(checkpoints(kind)).score(asked), expected, strict=True):
        np.testing.assert_allclose(ours.values, theirs.values, atol=2 * float32_loss(checkpoints(kind)).logit, rtol=0)


def test_graphs_are_captured_once_for_each_shape(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch)
    harness = Harness(checkpoints("qwen3"))
    request = generate(TEXTS[1], [Branch(seed=1, key=key, max_tokens=20) for key in range(5)], temperature=1.0)
    harness.complete(replace(request, sampling=replace(request.sampling, ignore_eos=True)))
    assert 0 < EmulatedGraph.captured < EmulatedGraph.replayed
    before = EmulatedGraph.captured, EmulatedGraph.replayed
    harness.complete(replace(request, sampling=replace(request.sampling, ignore_eos=True)))
    assert EmulatedGraph.captured - before[0] <= 1
    assert EmulatedGraph.replayed - before[1] >= 18


@pytest.mark.parametrize("shape", [(4, 4), (4, 9)], ids=["chain", "tree"])
def test_steps_with_drafts_are_captured(
    shape: tuple[int, int], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    branches = [Branch(seed=1, key=key, max_tokens=40) for key in range(3)]
    asked = generate(TEXTS[1], branches, temperature=1.0, ignore_eos=True)
    plain = Harness(checkpoints("qwen3"), replace(SMALL, device="cpu")).complete(asked)
    known = {
        (1, key, len(TEXTS[1]) + place): token
        for key, one in enumerate(plain)
        for place, token in enumerate(one.token_ids)
    }
    emulate_gpu(monkeypatch)
    harness = Harness(checkpoints("qwen3"))
    harness.core.start_speculation(Oracle(known, 360, right=1.0), FixedController(*shape))
    agree(harness.complete(asked), plain, checkpoints("qwen3"), asked=[asked])
    before = EmulatedGraph.replayed
    agree(harness.complete(asked), plain, checkpoints("qwen3"), asked=[asked])
    tally = harness.core.speculation_stats
    assert tally is not None
    assert tally.accepted > 150
    assert EmulatedGraph.replayed - before >= 6


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "qwen3_classify"])
def test_logits_are_not_rounded_to_the_dtype_of_the_weights(
    kind: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_gpu(monkeypatch, replace(EMULATED_GPU, dtype=torch.bfloat16))
    model = Harness(checkpoints(kind)).core.model.decoder
    logits = model.compute_logits(torch.randn(5, model.config.hidden_size).bfloat16())
    assert logits.dtype == torch.float32
    assert float((logits.bfloat16().float() == logits).float().mean()) < 0.1


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "gemma4_moe", "deepseek_v3"])
def test_stacked_experts_are_captured_and_sample_the_same(
    kind: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Hopper, where torch multiplies the groups in one kernel; on a CPU it has the same function as a loop."""
    emulate_gpu(monkeypatch, replace(EMULATED_GPU, dtype=torch.bfloat16))
    plain = Harness(checkpoints(kind)).core.model.decoder
    for module in ("decoder", "gpt_oss", "gemma4"):
        monkeypatch.setattr(f"engine.models.{module}.has_grouped_products", lambda _: True)
    harness = Harness(checkpoints(kind))
    stacked = harness.core.model.decoder
    assert isinstance(plain, Decoder)
    assert isinstance(stacked, Decoder)
    assert (plain.is_capturable, stacked.is_capturable) == (False, True)
    pairs = [
        (one.mlp, other.mlp)
        for one, other in zip(plain._layers, stacked._layers, strict=True)
        if isinstance(one.mlp, Experts | SharedExperts | ExpertsBesideMlp)
    ]
    assert len(pairs) > 0
    for one, other in pairs:
        for rows in (1, 2, 33):
            x = torch.randn(rows, plain.config.hidden_size).bfloat16()
            expected = one(x)
            # Biases are added to products before they are rounded, or after.
            bound = 4 * torch.finfo(torch.bfloat16).eps * float(expected.abs().max())
            torch.testing.assert_close(other(x), expected, atol=bound, rtol=0)
    assert len(harness.complete(requests()[3])) == 3
    assert EmulatedGraph.replayed > 0


def test_grouped_products_are_used_where_they_are_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = DeviceConfig(torch.device("cuda"), torch.bfloat16, uses_gpu_kernels=True)
    for capability, expected in (((9, 0), True), ((10, 3), True), ((8, 9), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert has_grouped_products(hopper) == expected
    assert not has_grouped_products(replace(hopper, dtype=torch.float32))
    assert not has_grouped_products(CPU)


def test_all_batch_sizes_pad_to_few_sizes() -> None:
    assert [pad_num_tokens(size) for size in (1, 2, 3, 5, 8, 9, 16, 17, 250)] == [1, 2, 4, 8, 8, 16, 16, 24, 256]


def test_nan_logits_fail_the_request(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch)
    harness = Harness(checkpoints("qwen3"))
    monkeypatch.setattr(harness.core.model.decoder, "_norm", torch.full((48,), torch.nan))
    events = harness.submit(requests()[0])
    harness.run()
    assert isinstance(events[-1], EngineError)
    assert "not finite" in str(events[-1])


def test_a_missing_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device("auto", "auto") == select_device("cpu", "float32") == CPU
    for device, dtype, words in (
        ("cuda", "auto", "no CUDA device"),
        ("tpu", "auto", "choose one of auto, cpu, cuda"),
        ("cpu", "float8", "choose one of auto, float32, bfloat16"),
        ("auto", "bfloat16", "float32 only"),
    ):
        with pytest.raises(EngineError, match=words):
            select_device(device, dtype)


def test_auto_selects_a_gpu_that_supports_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (select_device("auto", "auto").device.type, select_device("auto", "auto").dtype) == ("cuda", torch.bfloat16)
    assert select_device("cuda", "float32").dtype == torch.float32
    assert select_device("auto", "auto", cpu_only_reason="it is old") == select_device("cpu", "auto") == CPU
    with pytest.raises(EngineError, match="it is old"):
        select_device("cuda", "auto", cpu_only_reason="it is old")


def test_models_that_need_the_cpu_are_rejected_on_a_gpu(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(EngineError, match="transformers"):
        Harness(checkpoints("olmo2"), EngineOptions(kv_tokens=64, device="cuda"))
    assert Harness(checkpoints("olmo2"), EngineOptions(kv_tokens=64)).core.cache.data.is_cpu
    for kind, part in (("deepseek_v32", r"sparse attention \(vLLM computes it on GPUs\)"),):
        with pytest.raises(EngineError, match=f"has {part}: they are computed on the CPU alone"):
            Harness(checkpoints(kind), EngineOptions(kv_tokens=64, device="cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("kind", [*FAMILIES, "qwen3_5", "granite_hybrid", "nemotron_h", "falcon_h1", "mamba2", "lfm2"])
def test_a_real_gpu_samples_the_same_tokens_in_float32(kind: str, checkpoints: Checkpoints) -> None:
    expected = answers(checkpoints(kind), replace(SMALL, device="cpu"))
    agree(answers(checkpoints(kind), replace(SMALL, device="cuda", dtype="float32")), expected, checkpoints(kind))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("kind", ["ngram", "draft_model", "medusa", "eagle", "eagle3", "dflash"])
def test_drafters_on_a_real_gpu_change_no_token_in_float32(kind: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, wanted = checkpoints("qwen3"), drafter(kind, checkpoints, tmp_path)
    expected = answers(folder, replace(SMALL, device="cpu"))
    agree(answers(folder, replace(SMALL, device="cuda", dtype="float32", draft=wanted)), expected, folder)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma4_shared", "glm4_moe_lite"])
def test_drafts_of_other_families_on_a_real_gpu_change_no_token_in_float32(kind: str, checkpoints: Checkpoints) -> None:
    folder = checkpoints(kind)
    expected = answers(folder, replace(SMALL, device="cpu"))
    options = replace(SMALL, device="cuda", dtype="float32", draft=f"draft_model={folder}")
    agree(answers(folder, options), expected, folder)
