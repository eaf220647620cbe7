"""Time of decode steps with adapters, beside steps without: the fastest of interleaved runs, as load adds time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.engine.checkpoint import SIZES, cache_folder, checkpoint
from engine.core.engine_core import EngineCore
from engine.core.model_setup import ModelWeights
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, GenerateRequest, SamplingParams
from engine.scheduler.sequence import Request

BUNDLED = Path(__file__).parents[2] / "reasoner" / "bundled"
RANK = 16
ROUNDS = 9
STEPS = 24
ADAPTERS = 4


def measure_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the milliseconds of a decode step by model and number of branches."""
    torch.set_num_threads(1)
    models = {"policy": BUNDLED / "policy", "50M": checkpoint("50M", SIZES["50M"], cache_folder())}
    rows = []
    for name, model in models.items():
        adapters = {f"a{index}": _write_adapter(folder / f"{name}-{index}", model) for index in range(ADAPTERS)}
        plain, adapted = _open(model, {}), _open(model, adapters)
        for branches in (1, 8, 32):
            shares = {
                "none": (plain, ["m"] * branches),
                "unused": (adapted, ["m"] * branches),
                "half": (adapted, [f"a{index % ADAPTERS}" if index % 2 else "m" for index in range(branches)]),
                "all": (adapted, [f"a{index % ADAPTERS}" for index in range(branches)]),
            }
            times: dict[str, list[float]] = {share: [] for share in shares}
            for _ in range(ROUNDS):
                for share, (core, names) in shares.items():
                    times[share].append(_time_steps(core, names))
            rows.append({"model": name, "branches": branches} | {share: min(own) for share, own in times.items()})
    return rows


def _open(model: Path, adapters: Mapping[str, Path]) -> EngineCore:
    options = EngineOptions(kv_tokens=16_384, max_running=64)
    return EngineCore("m", model, options, ModelWeights("m", model, options, adapters=adapters))


def _write_adapter(folder: Path, model: Path) -> Path:
    """Write an adapter of random numbers for all linear modules of the layers."""
    weights = load_file(model / "model.safetensors")
    tensors = {}
    for name, weight in weights.items():
        if weight.dim() == 2 and ".layers." in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, weight.shape[1]) * 0.01
            tensors[f"{module}.lora_B.weight"] = torch.randn(len(weight), RANK) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def _time_steps(core: EngineCore, names: Sequence[str]) -> float:
    """Return the milliseconds of a step in which a branch of each of these models decodes."""
    for index, name in enumerate(names):
        branch = Branch(1, index, STEPS + 4)
        prompt = tuple(range(10, 42))
        sampling = SamplingParams(ignore_eos=True)
        request = GenerateRequest(f"r{index}", name, prompt, (branch,), sampling)
        in_flight = Request(request.request_id, lambda _: None)
        core.model.add_branches(request, in_flight)
        core.submit(in_flight)
    for _ in range(3):  # the prompts, which wait for each other where they are equal
        core.step()
    started = time.perf_counter()
    for _ in range(STEPS - 4):
        core.step()
    seconds = time.perf_counter() - started
    while core.has_work:
        core.step()
    return seconds / (STEPS - 4) * 1e3
