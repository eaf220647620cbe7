"""The captured sampling gives the tokens and log-probabilities of sampling step by step, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.cuda_triton import TritonAttention
from engine.models.decoder import Decoder
from engine.protocol.types import Branch
from engine.runner import fused_sampler_gpu
from engine.runner.fused_sampler_gpu import FusedGpuSampler
from engine.runner.graph_pool import pad_num_tokens
from engine.sampling.gpu import sample_on_gpu
from engine.sampling.sampler import Array
from engine.sampling.samples import DeviceSamples
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors
from tests.engine.conftest import Checkpoints
from tests.engine.gpu import EmulatedGraph, emulate_gpu, emulated_forward
from tests.engine.helpers import Harness, generate
from tests.engine.runner.test_piecewise_gpu import load, mixed_steps, new_cache
from tests.seeds import shift

PROMPT = tuple(range(3, 40))


def random_params(rng: np.random.Generator, rows: int) -> tuple[SamplingTensors[Array], NoiseKeys[Array]]:
    params = SamplingTensors(
        rng.choice([0.0, 0.7, 1.0, 1.5], rows),
        rng.choice([0.8, 1.0], rows),
        rng.choice([0.0, 0.05], rows),
        rng.choice([0, 3, 50], rows),
    )
    return params, NoiseKeys(*rng.integers(-(2**63), 2**63 - 1, (3, rows)))


def new_sampler(model: Decoder) -> FusedGpuSampler:
    cache = new_cache(model)
    attend = TritonAttention(model.config.attention, cache.data)
    attend.prepare(next(mixed_steps(model, cache, 0))[1])
    return emulated_forward(model, attend, torch.device("cpu")).fused_sampler


def equals_present(model: Decoder, num_steps: int = 60) -> bool:
    """Return True if steps of all sizes in a random order, and random parameters, give ``sample_on_gpu``'s samples."""
    rng, sampler = np.random.default_rng(shift(0)), new_sampler(model)
    for rows in rng.permutation(np.arange(num_steps) % 19 + 1).tolist():
        hidden = torch.from_numpy(rng.standard_normal((rows, model.config.hidden_size))).float()
        params, noise_keys = random_params(rng, rows)
        expected = sample_on_gpu(model.compute_logits(hidden), [], params, noise_keys).read()
        samples = sampler.launch(hidden, params, noise_keys)
        assert samples is not None
        if not all(map(np.array_equal, DeviceSamples(samples).read(), expected)):
            return False
    return True


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_captured_samples_equal_those_of_single_kernels_bit_for_bit(
    kind: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmulatedGraph, "captured", 0)
    monkeypatch.setattr(EmulatedGraph, "replayed", 0)
    with torch.inference_mode():
        assert equals_present(load(kind, checkpoints))
    assert EmulatedGraph.captured == len({1, 2, 4, 8, 16, 24})
    assert EmulatedGraph.replayed >= 40


def plant_stale_params(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fused_sampler_gpu, "copy_to_place", lambda values, target: target.copy_(values * 0 + 1))


def plant_unpadded(patch: pytest.MonkeyPatch) -> None:
    """Take each number of rows for the size below."""
    pad = pad_num_tokens
    patch.setattr(fused_sampler_gpu, "pad_num_tokens", lambda rows: pad(max(1, rows - 1)))


def plant_other_rows(patch: pytest.MonkeyPatch) -> None:
    """Sample each row after the hidden state of the row before."""
    compute = Decoder.compute_logits
    patch.setattr(Decoder, "compute_logits", lambda self, hidden: compute(self, hidden.roll(self._shift, 0)))
    launch = FusedGpuSampler.launch

    def launch_shifted(self: FusedGpuSampler, *arguments: Any) -> torch.Tensor | None:
        patch.setattr(Decoder, "_shift", 1, raising=False)
        samples = launch(self, *arguments)
        patch.setattr(Decoder, "_shift", 0, raising=False)
        return samples

    patch.setattr(Decoder, "_shift", 0, raising=False)
    patch.setattr(FusedGpuSampler, "launch", launch_shifted)


@pytest.mark.parametrize("plant", [plant_stale_params, plant_unpadded, plant_other_rows])
def test_planted_bugs_are_detected(
    plant: Callable[[pytest.MonkeyPatch], None], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("qwen3", checkpoints)
    plant(monkeypatch)
    with torch.inference_mode():
        try:
            is_equal = equals_present(model)
        except (RuntimeError, ValueError):  # rows that do not fit
            is_equal = False
    assert not is_equal


def test_more_logits_than_the_graphs_hold_are_not_captured(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("qwen3", checkpoints)
    monkeypatch.setattr(fused_sampler_gpu, "_MAX_LOGITS", 8 * model.config.vocab_size)
    sampler = new_sampler(model)
    params = random_params(np.random.default_rng(shift(0)), 9)
    with torch.inference_mode():
        assert sampler.launch(torch.zeros(9, model.config.hidden_size), *params) is None
        few = SamplingTensors(*(column[:8] for column in params[0])), NoiseKeys(*(column[:8] for column in params[1]))
        assert sampler.launch(torch.zeros(8, model.config.hidden_size), *few) is not None


def test_only_steps_whose_logits_are_changed_or_reported_compute_them_outside_of_graphs(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_gpu(monkeypatch)
    core = Harness(checkpoints("qwen3")).core
    plain = generate(PROMPT, [Branch(seed=1, key=key, max_tokens=12) for key in range(3)], temperature=1.0)
    for fields, is_fused in (({}, True), ({"logprobs": 2}, False), ({"repetition_penalty": 1.2}, False)):
        harness, num_calls = Harness(checkpoints("qwen3")), [0]
        sample = harness.core.runner.sampler

        def counted(*arguments: Any, sample: Any = sample, num_calls: list[int] = num_calls) -> Any:
            num_calls[0] += 1
            return sample(*arguments)

        monkeypatch.setattr(harness.core.runner, "sampler", counted)
        harness.complete(replace(plain, sampling=replace(plain.sampling, ignore_eos=True, **fields)))
        assert (num_calls[0] == 0) == is_fused
    assert isinstance(core.runner.forward.fused_sampler, FusedGpuSampler)
