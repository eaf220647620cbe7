"""Random LoRA adapters in PEFT's format, and what transformers computes with them in float64."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.adapters.config import AdapterConfig, read_adapter_config
from engine.core.engine_core import EngineCore
from engine.core.model_setup import ModelWeights
from engine.core.reference import float64
from engine.protocol.options import EngineOptions
from tests.closeness import assert_rounded
from tests.engine.exact import exact_reference
from tests.engine.helpers import SMALL, Harness
from tests.rounding import MARGIN, compute_rounded
from tests.seeds import shift

ALL = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
INVOCATION = (7, 9, 8)


def save_adapter(
    folder: Path, base: Path, *, modules: Sequence[str] = ALL, rank: int = 4, seed: int = 0, **fields: Any
) -> Path:
    """Save an adapter with random matrices for the linear modules of a base whose names end so."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": list(modules),
    } | fields
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    read = read_adapter_config(folder)
    generator = torch.Generator().manual_seed(shift(100 + seed))
    tensors: dict[str, Tensor] = {}
    for name, weight in linear_weights(base).items():
        if read.targets(name):
            own = read.find_rank(name)
            for letter, shape in (("A", (own, weight.shape[1])), ("B", (len(weight), own))):
                matrix = torch.randn(*shape, generator=generator) * 0.2
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = matrix
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def linear_weights(base: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint's linear modules in its layers, by the modules' names."""
    tensors = load_file(base / "model.safetensors")
    matrices = {name: tensor for name, tensor in tensors.items() if tensor.dim() == 2 and ".layers." in name}
    return {name.removesuffix(".weight"): tensor for name, tensor in matrices.items()}


def create_harness(base: Path, adapters: Mapping[str, Path], options: EngineOptions = SMALL) -> Harness:
    """Return an engine core, stepped by hand, with adapters."""
    harness = Harness.__new__(Harness)
    weights = ModelWeights("m", base, options, adapters=adapters)
    harness.core = EngineCore("m", base, options, weights)
    return harness


@contextmanager
def adapted(base: Path, adapter: Path, start: int) -> Iterator[Any]:
    """Give transformers' model in float64 with an adapter that is active from a position on, by its definition."""
    config, tensors = read_adapter_config(adapter), load_file(adapter / "adapter_model.safetensors")
    with float64():
        model = exact_reference(base)
    hooks = []
    for name, module in model.named_modules():
        down = tensors.get(f"base_model.model.{name}.lora_A.weight")
        if down is not None:
            up = tensors[f"base_model.model.{name}.lora_B.weight"]
            update = _Update(down.double(), up.double(), scale_of(config, name), start)
            hooks.append(module.register_forward_hook(update))
    try:
        yield model
    finally:
        for hook in hooks:
            hook.remove()


def scale_of(config: AdapterConfig, name: str) -> float:
    """Return the scale of the first matching patterns of a config whose patterns are ends of names."""
    ends = [(config.rank_pattern, config.rank), (config.alpha_pattern, config.alpha)]
    rank, alpha = (next((v for k, v in pattern.items() if name.endswith(k)), default) for pattern, default in ends)
    return float(alpha / (rank**0.5 if config.use_rslora else rank))


class _Update:
    """A forward hook that adds an update from a position on."""

    def __init__(self, down: Tensor, up: Tensor, scale: float, start: int) -> None:
        self._down, self._up, self._scale, self._start = down, up, scale, start

    def __call__(self, _module: object, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        update = torch.nn.functional.linear(inputs[0], self._down)
        update = torch.nn.functional.linear(update, self._up) * self._scale
        update[:, : self._start] = 0
        return output + update


def assert_adapted(
    ours: Tensor, base: Path, adapter: Path, tokens: Sequence[int], *, start: int = 0, first: int = 0
) -> None:
    """Check that logits from position ``first`` on err by no more than float32 does."""
    exact, runs = _compute(base, adapter, tokens, start)
    bound = MARGIN * max(float((run - exact)[first:].abs().max()) for run in runs)
    assert_rounded(ours, exact[first:], bound)


def exact_logprobs(base: Path, adapter: Path, tokens: Sequence[int], *, start: int = 0) -> tuple[Tensor, float]:
    """Return the log-probabilities in float64, and a bound on the error of float32."""
    logits, runs = _compute(base, adapter, tokens, start)
    exact = logits.log_softmax(-1)
    return exact, MARGIN * max(float((run.log_softmax(-1) - exact).abs().max()) for run in runs)


def _compute(base: Path, adapter: Path, tokens: Sequence[int], start: int) -> tuple[Tensor, list[Tensor]]:
    """Return the logits in float64, and those of several runs with random roundings."""
    with adapted(base, adapter, start) as model, float64():

        def compute() -> Tensor:
            logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
            return logits

        return compute(), list(compute_rounded(compute))
