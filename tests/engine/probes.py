"""Probes with known weights, and the same head on transformers' own hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.core.reference import float64
from engine.fingerprint import fingerprint
from engine.gguf.folder import weight_files
from engine.models.config import read_raw_config
from engine.runner.probe import Probe
from tests.rounding import float32_bound
from tests.seeds import shift


def plant_probe(model: Path, folder: Path, layers: Sequence[int] = (1, 2), *, units: int = 1, seed: int = 0) -> Probe:
    """Write a probe with random weights for a model of small width into a new folder."""
    rng, width = np.random.default_rng(shift(seed)), len(layers) * int(read_raw_config(model).fields["hidden_size"])
    weight, bias = (
        (rng.normal(0, 1 / np.sqrt(width), shape).astype(np.float32).astype(np.float64))
        for shape in ((units, width), units)
    )
    hidden = {} if units == 1 else {"output_weight": np.linspace(-1, 1, units), "output_bias": 0.125}
    probe = Probe(fingerprint(model, weight_files(model)), tuple(layers), weight, bias, **hidden)  # type: ignore[arg-type]
    folder.mkdir(parents=True)
    probe.save(folder, {})
    return probe


def exact_scores(model: Path, probe: Probe, texts: Sequence[Sequence[int]]) -> tuple[list[Tensor], float]:
    """Return the head's probabilities at every token of each text in float64, and the bound on the error of float32.

    The bound is that of the four longest texts, whose tokens are enough.
    """
    with float64():
        exact = _peer_scores(model, probe, texts)
    longest = sorted(texts, key=len)[-4:]
    return exact, float32_bound(lambda: torch.cat(_peer_scores(model, probe, longest)))


def _peer_scores(model: Path, probe: Probe, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Compute the head on transformers' hidden states in torch's default dtype."""
    how = {"dtype": torch.get_default_dtype(), "attn_implementation": "eager"}
    loaded = AutoModelForCausalLM.from_pretrained(model, **how).eval()
    inputs: list[Tensor] = []
    body = loaded.get_decoder()
    # What transformers lists as the last hidden state comes after the final norm.
    body.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    scores = []
    with torch.no_grad():
        for text in texts:
            inputs.clear()
            states = body(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
            [final] = inputs
            chosen = [final if layer == len(states) - 1 else states[layer] for layer in probe.layers]
            rows = torch.cat([layer[0] for layer in chosen], dim=1).double()
            logits = rows @ torch.from_numpy(probe.weight).T + torch.from_numpy(probe.bias)
            if probe.output_weight is not None:
                logits = logits.relu() @ torch.from_numpy(probe.output_weight)[:, None] + probe.output_bias
            scores.append(logits[:, 0].sigmoid())
    return scores
