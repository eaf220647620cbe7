"""Steps captured in pieces give the hidden states of steps that launch kernel by kernel, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.plan import AttentionMetadata
from engine.cache.paged_kv import KVCache
from engine.device import DeviceConfig
from engine.models.decoder import Decoder
from engine.models.interface import Batch
from engine.models.load import load_model
from engine.runner import forward_gpu
from engine.runner.batch import lay_out
from engine.runner.forward import create_gpu_attention
from engine.runner.piecewise_gpu import SIZES, Exchange, PiecewiseStep, pad_to_size
from tests.engine.conftest import Checkpoints
from tests.engine.gpu import EMULATED_GPU, EmulatedGraph, emulated_forward
from tests.long import mostly_long
from tests.seeds import shift

ROWS, CONTEXT, PAGE = 4, 224, 16
KINDS = ["qwen3", "qwen3_window", "gemma2", "phi3", "llama_bias", "gemma4", "gemma4_shared", "gemma4_plain"]
"""Families without experts."""


def load(kind: str, checkpoints: Checkpoints, device_config: DeviceConfig = EMULATED_GPU) -> Decoder:
    model = load_model(checkpoints(kind), lambda config: config.max_context, device_config)
    assert isinstance(model, Decoder)
    return model


def new_cache(model: Decoder) -> KVCache:
    """Return a cache in which every row has pages of its own."""
    cache = KVCache(
        layers=model.config.head_shapes,
        pages=ROWS * CONTEXT // PAGE,
        page_size=PAGE,
        rows=ROWS,
        context=CONTEXT,
        device_config=model.device_config,
        dtype=model.device_config.dtype,
    )
    cache.page_table[:] = np.arange(ROWS * CONTEXT // PAGE).reshape(ROWS, -1)
    return cache


def mixed_steps(model: Decoder, cache: KVCache, seed: int) -> Iterator[tuple[Batch, AttentionMetadata]]:
    """Yield random steps, each with a chunk of a prompt and perhaps some rows that decode, until all rows are full."""
    rng, computed = np.random.default_rng(shift(seed)), np.zeros(ROWS, np.int64)
    while (computed < CONTEXT - 26).all():
        rows = np.sort(rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)])
        queries = np.where(rng.random(len(rows)) < 0.5, 1, rng.integers(1, 40, len(rows)))
        queries[rng.integers(len(rows))] = rng.integers(26, 60)
        queries = np.minimum(queries, CONTEXT - computed[rows])
        computed[rows] += queries
        metadata = lay_out(cache, model.config.attention[0], rows, queries, computed[rows], trees={})
        positions = np.concatenate(
            [np.arange(end - count, end) for end, count in zip(computed[rows], queries, strict=True)]
        )
        tokens = rng.integers(3, model.config.vocab_size, len(positions))
        if queries.max() > 25:
            yield Batch(torch.from_numpy(tokens), torch.from_numpy(positions)), metadata


def equals_eager(model: Decoder, layers: frozenset[int] = frozenset(), seeds: tuple[int, ...] = (0, 1, 2)) -> bool:
    """Return True if random walks of steps of changing sizes give the same, and write the same into the cache."""
    caches = new_cache(model), new_cache(model)
    eager, attend = (create_gpu_attention(model.config.attention, cache) for cache in caches)
    forward = emulated_forward(model, attend, torch.device("cpu"))
    for seed in seeds:
        for batch, metadata in mixed_steps(model, caches[0], seed):
            kept: dict[int, torch.Tensor] = {}
            eager.prepare(metadata)
            expected = model.forward(batch, eager, lambda layer, hidden, kept=kept: kept.update({layer: hidden}))
            found = forward(batch, metadata, layers=layers)[: len(expected)]
            own = [forward.kept[layer][: len(expected)] for layer in layers]
            if not torch.equal(found, expected) or not all(map(torch.equal, own, (kept[one] for one in layers))):
                return False
    pools = zip(*(cache.pools for cache in caches), strict=True)
    return all(torch.equal(one.data, other.data) for one, other in pools)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedGraph, "captured", 0)
    monkeypatch.setattr(EmulatedGraph, "replayed", 0)


@pytest.mark.parametrize("kind", mostly_long(KINDS, every=3))
@pytest.mark.usefixtures("counted")
def test_random_mixed_steps_equal_eager_ones_bit_for_bit(kind: str, checkpoints: Checkpoints) -> None:
    model = load(kind, checkpoints)
    with torch.inference_mode():
        assert equals_eager(model)
    pieces = model.config.num_layers + 1
    assert EmulatedGraph.captured >= 3 * pieces
    assert EmulatedGraph.captured % pieces == EmulatedGraph.replayed % pieces == 0
    assert EmulatedGraph.replayed > EmulatedGraph.captured


@pytest.mark.usefixtures("counted")
def test_pieces_keep_the_hidden_states_of_layers(checkpoints: Checkpoints) -> None:
    model = load("qwen3", checkpoints)
    with torch.inference_mode():
        assert equals_eager(model, frozenset(range(1, model.config.num_layers)))
    assert EmulatedGraph.replayed > 0


@pytest.mark.usefixtures("counted")
def test_stacked_experts_are_captured_in_pieces(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without padding and with the same sizes again: in bfloat16 a CPU's products round by the number of rows."""
    monkeypatch.setattr(forward_gpu, "pad_to_size", lambda num_tokens: num_tokens)
    monkeypatch.setattr("engine.models.decoder.has_grouped_products", lambda _: True)
    model = load("qwen3_moe", checkpoints, replace(EMULATED_GPU, dtype=torch.bfloat16))
    assert model.is_capturable
    with torch.inference_mode():
        assert equals_eager(model, seeds=(0, 0, 0))
    assert EmulatedGraph.replayed > 0


def plant_stale_inputs(patch: pytest.MonkeyPatch) -> None:
    """Leave the tokens of the first step of each size in place."""
    filled: set[int] = set()

    def copy_once(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target.data_ptr() not in filled:
            target.copy_(values)
        filled.add(target.data_ptr())
        return target

    patch.setattr(forward_gpu, "copy_to_place", copy_once)


def plant_wrong_size(patch: pytest.MonkeyPatch) -> None:
    """Attend from one row less than the step has tokens."""
    attend = PiecewiseStep._attend

    def attend_less(self: PiecewiseStep, index: int, num_tokens: int, *rest: Any) -> None:
        attend(self, index, num_tokens - 1, *rest)

    patch.setattr(PiecewiseStep, "_attend", attend_less)


def plant_shared_size(patch: pytest.MonkeyPatch) -> None:
    """Pad to a size that holds no more than all tokens but the last eight."""
    patch.setattr(forward_gpu, "pad_to_size", lambda count: (pad_to_size(count) or 16) - 8)


def plant_wrong_order(patch: pytest.MonkeyPatch) -> None:
    """Replay the pieces of the last two layers in each other's place."""
    capture = PiecewiseStep.capture

    def swap(self: PiecewiseStep, graphs: object) -> None:
        capture(self, graphs)  # type: ignore[arg-type]
        self._replays[-2:] = self._replays[:-3:-1]

    patch.setattr(PiecewiseStep, "capture", swap)


def plant_stale_attention(patch: pytest.MonkeyPatch) -> None:
    """Write the attention's output to a place that the next piece does not read."""
    attend = PiecewiseStep._attend

    def attend_elsewhere(self: PiecewiseStep, index: int, num_tokens: int, *rest: Any) -> None:
        read = self._attn_out
        if self.is_captured:
            self._attn_out = Exchange(read._size)
        attend(self, index, num_tokens, *rest)
        self._attn_out = read

    patch.setattr(PiecewiseStep, "_attend", attend_elsewhere)


@pytest.mark.parametrize(
    "plant", [plant_stale_inputs, plant_wrong_size, plant_shared_size, plant_wrong_order, plant_stale_attention]
)
def test_planted_bugs_are_detected(
    plant: Callable[[pytest.MonkeyPatch], None], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with torch.inference_mode(), suppress(ValueError, IndexError):  # tokens that do not fit
        assert not equals_eager(load("qwen3", checkpoints))


def test_steps_pad_to_the_smallest_size_that_holds_them() -> None:
    assert [pad_to_size(count) for count in (1, 8, 9, 33, 65, 512, 513)] == [8, 8, 16, 48, 96, 512, None]
    assert list(SIZES) == sorted(set(SIZES))
    # Padding adds at most a half to a step of more than 8 tokens.
    assert all(2 * (pad_to_size(count) or 0) <= 3 * count + 16 for count in range(9, SIZES[-1] + 1))
