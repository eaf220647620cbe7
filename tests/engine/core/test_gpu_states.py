"""Models with states on the GPU path, emulated: the tokens of the CPU, and the same prefixes from the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.models.decoder import Decoder
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, GenerateRequest
from engine.runner.forward_gpu import GpuForward
from engine.speculation.control.controller import FixedController
from tests.engine.conftest import Checkpoints
from tests.engine.core.test_hybrid_models import BRANCHES, PROMPT
from tests.engine.gpu import EMULATED_GPU, emulate_gpu
from tests.engine.helpers import SMALL, Harness, generate
from tests.engine.models.test_models import random_tokens
from tests.engine.runner.test_gpu_engine import agree, answers
from tests.engine.speculation.stub_drafters import Oracle
from tests.long import mostly_long, mostly_long_grid

CAPTURED = ["qwen3_5", "mamba2", "lfm2", "falcon_h1", "nemotron_h", "granite_hybrid_dense", "bamba"]
"""Kinds whose feed-forward parts the host waits for nothing in."""
HYBRIDS = [*CAPTURED, "qwen3_next", "granite_hybrid", "nemotron_h_moe", "qwen3_5_moe"]


def search(harness: Harness) -> list[Completion]:
    """Return two steps of a search, the second of which goes on where a stop token has ended each branch of the first.

    That token is known only after the next step was launched.
    """
    parents = harness.complete(asked(PROMPT, BRANCHES))
    children: list[Completion] = []
    for parent in parents[:3]:
        children += harness.complete(asked((*PROMPT, *parent.token_ids), BRANCHES[:2]))
    return [*parents, *children]


def asked(prompt: tuple[int, ...], branches: list[Branch]) -> GenerateRequest:
    return generate(prompt, branches, temperature=0.8, ignore_eos=True, stop_token_ids=tuple(range(100, 140)))


@pytest.mark.parametrize("kind", mostly_long(HYBRIDS, every=3))
def test_a_search_on_the_gpu_has_the_tokens_and_the_cached_prefixes_of_the_cpu(
    kind: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = search(Harness(checkpoints(kind), replace(SMALL, device="cpu")))
    assert "stop" in {completion.finish_reason for completion in expected}
    emulate_gpu(monkeypatch)
    harness = Harness(checkpoints(kind))
    found = search(harness)
    assert [(one.token_ids, one.cached_tokens) for one in found] == [
        (one.token_ids, one.cached_tokens) for one in expected
    ]
    decoder = harness.core.model.decoder
    assert isinstance(decoder, Decoder)
    assert decoder.is_capturable == (kind in CAPTURED)
    forward = harness.core.runner.forward
    assert isinstance(forward, GpuForward)
    assert bool(forward._graphs) == bool(forward._piecewise) == decoder.is_capturable
    harness.core.check_invariants()


@pytest.mark.parametrize("kind", mostly_long(HYBRIDS, every=4))
def test_the_gpu_samples_the_tokens_of_the_cpu_with_all_parameters(
    kind: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(checkpoints(kind), replace(SMALL, device="cpu"))
    emulate_gpu(monkeypatch)
    agree(answers(checkpoints(kind)), expected, checkpoints(kind))


@pytest.mark.parametrize(
    ("options", "kind"),
    mostly_long_grid(
        [
            EngineOptions(kv_tokens=160, max_running=8, step_tokens=24),
            replace(SMALL, state_slots=2),
            replace(SMALL, state_slots=5),
            replace(SMALL, draft="ngram"),
            replace(SMALL, draft="ngram", state_slots=14),
            replace(SMALL, kv_dtype="int8"),
        ],
        ["qwen3_5", "falcon_h1", "mamba2", "lfm2", "nemotron_h"],
        every=7,
    ),
)
def test_little_memory_and_drafts_on_the_gpu_change_no_token(
    options: EngineOptions, kind: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = (*PROMPT[:20], *PROMPT[:20], *PROMPT[:5])
    request = generate(prompt, BRANCHES, temperature=0.8, ignore_eos=True)
    plain = Harness(checkpoints(kind), replace(SMALL, kv_dtype=options.kv_dtype)).complete(request)
    emulate_gpu(monkeypatch)
    harness = Harness(checkpoints(kind), options)
    assert [one.token_ids for one in harness.complete(request)] == [one.token_ids for one in plain]
    harness.core.check_invariants()


@pytest.mark.parametrize(
    ("shape", "kind"),
    mostly_long_grid([(4, 4), (4, 9)], ["qwen3_5", "falcon_h1", "mamba2"], every=5),
)
def test_accepted_drafts_on_the_gpu_go_on_from_their_own_state(
    shape: tuple[int, int], kind: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    branches = [Branch(1, key, 40) for key in range(3)]
    request = generate(PROMPT, branches, temperature=0.8, ignore_eos=True)
    plain = Harness(checkpoints(kind)).complete(request)
    known = {
        (1, key, len(PROMPT) + place): token
        for key, one in enumerate(plain)
        for place, token in enumerate(one.token_ids)
    }
    emulate_gpu(monkeypatch)
    harness = Harness(checkpoints(kind))
    harness.core.start_speculation(Oracle(known, 360, right=0.8), FixedController(*shape))
    found = harness.complete(request)
    assert sum(one.accepted_tokens for one in found) > 20
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    harness.core.check_invariants()


@pytest.mark.parametrize(
    "kind", mostly_long(["granite_hybrid", "qwen3_next", "nemotron_h_moe", "qwen3_5_moe"], every=4)
)
def test_stacked_experts_beside_states_are_captured(
    kind: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Hopper in bfloat16; a second engine repeats the search."""
    emulate_gpu(monkeypatch, replace(EMULATED_GPU, dtype=torch.bfloat16))
    for module in ("decoder", "recurrent.mamba"):
        monkeypatch.setattr(f"engine.models.{module}.has_grouped_products", lambda _: True)
    found: list[list[tuple[int, ...]]] = []
    for _ in range(2):
        harness = Harness(checkpoints(kind))
        decoder, forward = harness.core.model.decoder, harness.core.runner.forward
        assert isinstance(decoder, Decoder)
        assert decoder.is_capturable
        found.append([one.token_ids for one in search(harness)])
        assert isinstance(forward, GpuForward)
        assert forward._graphs
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["qwen3_5"])
def test_snapshots_along_a_text_are_kept_when_its_tokens_are_read(
    kind: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch from the middle of a generated text begins at the last of them."""
    found: list[int] = []
    for device in ("cpu", "auto"):
        if device == "auto":
            emulate_gpu(monkeypatch)
        harness = Harness(checkpoints(kind), replace(SMALL, device=device))
        assert harness.core.cache.states is not None
        harness.core.cache.states.snapshot_distance = SMALL.page_size
        [long] = harness.complete(generate(PROMPT, [Branch(5, 0, 80)], temperature=0.8, ignore_eos=True))
        middle = (*PROMPT, *long.token_ids[:60], *random_tokens(3, 7))
        [branch] = harness.complete(generate(middle, [Branch(6, 0, 4)], temperature=0.8, ignore_eos=True))
        found.append(branch.cached_tokens)
        harness.core.check_invariants()
    assert found[0] == found[1] > len(PROMPT) + 60 - 2 * SMALL.page_size
