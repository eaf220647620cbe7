"""The float64 reference of the tests: nothing in it is computed in float32, and it equals the formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engine.conftest import MODELS, Checkpoints
from tests.engine.exact import exact_logits, exact_reference, peer_logits
from tests.engine.models.test_models import random_tokens

WITHOUT_ROPE = "gpt2", "jamba", "mamba2", "granite_hybrid", "nemotron_h", "nemotron_h_moe"


class Seen(TorchDispatchMode):
    """Records the dtypes of all floating-point results of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.dtypes |= {one.dtype for one in tree_leaves(made) if isinstance(one, Tensor) and one.is_floating_point()}
        return made


@pytest.mark.parametrize("kind", MODELS)
def test_nothing_of_the_reference_is_computed_in_float32(checkpoints: Checkpoints, kind: str) -> None:
    model = exact_reference(checkpoints(kind))
    with Seen() as seen:
        exact_logits(checkpoints(kind), random_tokens(40, 1))
    assert seen.dtypes == {torch.float64}
    frequencies = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert bool(frequencies) == (kind not in WITHOUT_ROPE)
    # Nor were they in float32 before they became float64; the first of them is 1, which float32 holds.
    assert not any(one.equal(one.float().double()) for one in frequencies if len(one) > 1)


def plain_llama(folder: Path, tokens: tuple[int, ...]) -> Tensor:
    """Compute Llama's formulas in float64, one head after the other."""
    config = json.loads((folder / "config.json").read_text())
    w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    dim, theta = config["head_dim"], config["rope_parameters"]["rope_theta"]
    each = config["num_attention_heads"] // config["num_key_value_heads"]
    places = torch.arange(len(tokens), dtype=torch.float64)
    angles = torch.stack([places * theta ** (-2 * pair / dim) for pair in range(dim // 2)], dim=1)
    unseen = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(1, keepdim=True) + config["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    def turned(x: Tensor) -> Tensor:
        one, other = x[:, : dim // 2], x[:, dim // 2 :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=1)

    x = w["model.embed_tokens.weight"][list(tokens)]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        y, mixed = norm(x, f"{layer}.input_layernorm"), []
        q, k, v = ((y @ w[f"{layer}.self_attn.{one}_proj.weight"].T).split(dim, dim=1) for one in "qkv")
        for head, query in enumerate(q):
            scores = turned(query) @ turned(k[head // each]).T / math.sqrt(dim)
            weights = scores.masked_fill(unseen, -torch.inf).exp()
            mixed.append(weights / weights.sum(1, keepdim=True) @ v[head // each])
        x = x + torch.cat(mixed, dim=1) @ w[f"{layer}.self_attn.o_proj.weight"].T
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (y @ w[f"{layer}.mlp.{one}_proj.weight"].T for one in ("gate", "up"))
        x = x + (gate / (1 + (-gate).exp()) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ w["lm_head.weight"].T


def test_the_reference_equals_the_formulas_in_float64(checkpoints: Checkpoints) -> None:
    """The difference is at most a ten-thousandth of the error of float32."""
    folder, tokens = checkpoints("llama"), random_tokens(70, 1)
    exact = plain_llama(folder, tokens)
    assert (exact_logits(folder, tokens) - exact).abs().max() < 1e-11 * exact.abs().max()
    assert (peer_logits(folder, tokens).double() - exact).abs().max() > 1e-7 * exact.abs().max()
