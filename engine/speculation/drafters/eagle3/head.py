"""EAGLE-3 heads in their public formats: a decoder layer on hidden states of several layers of the target.

Li et al. 2025, https://arxiv.org/abs/2503.01840; the formats: ``config``.

``fc`` fuses the hidden states ``[low; middle; high]`` of a position to a feature ``h``. With the embedding ``e`` of the
next token, the layer attends from ``[norm(e); norm(h)]``, twice as wide as its output, adds the result to ``h`` and
applies a feed-forward part. The output is the feature of the next position, from which later draft tokens go on: the
target's hidden states replace it once it is verified. Another norm and an output projection of the head's own give the
logits of a smaller vocabulary, ``d2t`` says how far each of its tokens is from the target's. A token outside it has no
probability as a draft token; whether it is sampled is up to the target.

Everything else, the layer's keys and values in the target's pages above all, is as for ``eagle``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from engine.device import to_device
from engine.models.interface import Model
from engine.protocol.types import EngineError
from engine.speculation.drafters.draft_layer import Attend
from engine.speculation.drafters.eagle import EagleDrafter
from engine.speculation.drafters.eagle3.config import KIND, Eagle3Config, read_eagle3_config
from engine.speculation.drafters.head_config import product
from engine.weights.safetensors import Weights
from kernels.common.rotary import rotary
from kernels.layers.activation import silu_mul
from kernels.layers.norm import rms_norm
from kernels.linear.embedding import EmbeddingTable

_SAFEAI_LAYER, _LAYER = "midlayer.", "layers.0."
"""Prefix of the layer's tensors in SafeAILab's checkpoints, and in vLLM's."""
_TRAINING_TENSORS = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Copies of the target's weights that training compares with."""


def load_eagle3(folder: Path, model: Model) -> EagleDrafter:
    """Load the head in ``folder`` (``config.json``, ``model.safetensors``) for a target.

    Raises ``EngineError`` that names what is missing, damaged, left over, or does not fit the target.
    """
    config = read_eagle3_config(folder, model.config)
    _refuse_pickles(folder)
    return EagleDrafter(_Eagle3Layer(folder, config, model), model)


class _Eagle3Layer:
    """The ``DraftLayer`` of EAGLE-3."""

    kind = KIND

    def __init__(self, folder: Path, config: Eagle3Config, model: Model) -> None:
        self.layer_config = config.attention
        self.observed_layers = config.target_layers
        self.state_size = len(config.target_layers) * model.config.hidden_size
        self._config = config
        weights = Weights(folder)
        reader = _Reader(folder, weights, config, model)
        has_own_embedding = weights.has("embed_tokens.weight") or config.hidden_size != model.config.hidden_size
        self.embed = reader.embedding() if has_own_embedding else model.embed
        self._input_norm = reader.norm("input_norm", self.state_size) if config.norm_before_fc else None
        self._fc_norms = (
            [reader.norm(f"fc_norm.{index}", model.config.hidden_size) for index, _ in enumerate(config.target_layers)]
            if config.fc_norm
            else []
        )
        self._fc = reader.product({"fc": config.hidden_size}, self.state_size)
        self._read_layer(reader, _SAFEAI_LAYER if weights.has(f"{_SAFEAI_LAYER}hidden_norm.weight") else _LAYER)
        self._norm = reader.norm("norm", config.hidden_size)
        self._head = reader.product({"lm_head": config.draft_vocab_size}, config.hidden_size)
        self._vocab_size = model.config.vocab_size
        self._target_ids = reader.target_ids()
        for name in _TRAINING_TENSORS:
            weights.drop(name)
        weights.finish()

    def _read_layer(self, reader: _Reader, prefix: str) -> None:
        config, layer_config = self._config, self.layer_config
        attention, mlp, hidden = f"{prefix}self_attn.", f"{prefix}mlp.", config.hidden_size
        queries, keys = layer_config.heads * layer_config.head_dim, layer_config.kv_heads * layer_config.head_dim
        self._embedding_norm = reader.norm(f"{prefix}input_layernorm", hidden)
        self._hidden_norm = reader.norm(f"{prefix}hidden_norm", hidden)
        parts = {f"{attention}q_proj": queries, f"{attention}k_proj": keys, f"{attention}v_proj": keys}
        self._qkv = reader.product(parts, 2 * hidden, has_bias=config.has_attention_bias)
        self._qk_norm: Tensor | None = None
        if config.has_qk_norm:
            query, key = (reader.norm(f"{attention}{name}_norm", layer_config.head_dim) for name in ("q", "k"))
            self._qk_norm = torch.stack([query] * layer_config.heads + [key] * layer_config.kv_heads)
        self._output = reader.product({f"{attention}o_proj": hidden}, queries, has_bias=config.has_attention_bias)
        self._mlp_norm = reader.norm(f"{prefix}post_attention_layernorm", hidden)
        gates = {f"{mlp}{name}_proj": config.intermediate_size for name in ("gate", "up")}
        self._gate_up = reader.product(gates, hidden, has_bias=config.has_mlp_bias)
        self._down = reader.product({f"{mlp}down_proj": hidden}, config.intermediate_size, has_bias=config.has_mlp_bias)

    def create_rotary_tables(self, positions: int) -> tuple[Tensor, Tensor]:
        cos, sin = self._config.rope.tables(positions)
        return cos, sin

    def fuse(self, states: Tensor) -> Tensor:
        eps = self._config.norm_eps
        if self._input_norm is not None:
            states = rms_norm(states, self._input_norm, eps)
        if self._fc_norms:
            parts = states.chunk(len(self._fc_norms), dim=1)
            normed = [rms_norm(part.contiguous(), norm, eps) for part, norm in zip(parts, self._fc_norms, strict=True)]
            states = torch.cat(normed, dim=1)
        return self._fc(states)

    def __call__(self, features: Tensor, embedded: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        layer_config, eps = self.layer_config, self._config.norm_eps
        normed = rms_norm(features, self._hidden_norm, eps)
        residual = normed if self._config.norm_before_residual else features
        inputs = torch.cat((rms_norm(embedded, self._embedding_norm, eps), normed), dim=1)
        qkv = self._qkv(inputs).view(len(inputs), -1, layer_config.head_dim)
        qk, values = qkv.tensor_split((layer_config.heads + layer_config.kv_heads,), dim=1)
        if self._qk_norm is not None:
            qk = rms_norm(qk.contiguous(), self._qk_norm, eps)
        qk = rotary(qk.float(), *angles).to(qkv.dtype)
        hidden = residual + self._output(attend(qk[:, : layer_config.heads], qk[:, layer_config.heads :], values))
        hidden = hidden + self._down(silu_mul(self._gate_up(rms_norm(hidden, self._mlp_norm, eps))))
        return rms_norm(hidden, self._norm, eps) if self._config.norm_output else hidden

    def compute_logits(self, features: Tensor) -> Tensor:
        if not self._config.norm_output:
            features = rms_norm(features, self._norm, self._config.norm_eps)
        logits = self._head(features).float()
        if self._target_ids is None:
            return logits
        whole = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        whole[:, self._target_ids] = logits
        return whole


class _Reader:
    """Reads a head's tensors onto the target's device."""

    def __init__(self, folder: Path, weights: Weights, config: Eagle3Config, model: Model) -> None:
        self._folder, self._weights, self._config = folder, weights, config
        self._vocab_size = model.config.vocab_size
        self._device_config = model.device_config

    def norm(self, name: str, size: int) -> Tensor:
        # float32 on every device, as the target's.
        return self._weights.take(f"{name}.weight", size).to(self._device_config.device)

    def product(self, parts: dict[str, int], columns: int, *, has_bias: bool = False) -> Callable[[Tensor], Tensor]:
        """Return the product with matrices of these names and numbers of rows, one below the other."""
        convert, take = self._device_config.convert, self._weights.take
        weight = convert(torch.cat([take(f"{name}.weight", rows, columns) for name, rows in parts.items()]))
        bias = convert(torch.cat([take(f"{name}.bias", rows) for name, rows in parts.items()])) if has_bias else None
        return product(weight, bias)

    def embedding(self) -> Callable[[Tensor], Tensor]:
        """Return the lookup in the head's own table."""
        rows = self._weights.take("embed_tokens.weight", self._vocab_size, self._config.hidden_size)
        return EmbeddingTable(self._device_config.convert(rows))

    def target_ids(self) -> Tensor | None:
        """Return the target's token ``[draft_vocab_size]`` for each of the head's; ``None`` if they are the same."""
        weights, count, vocab = self._weights, self._config.draft_vocab_size, self._vocab_size
        if count == vocab:
            # Both formats' own code does not read the mappings then.
            weights.drop("d2t")
            weights.drop("t2d")
            return None
        weights.expect("d2t", count)
        offsets = weights.take_raw("d2t", None)
        if offsets.is_floating_point():
            raise EngineError(f"{self._folder}: 'd2t' is {offsets.dtype}; it must be of whole numbers")
        ids = torch.arange(count) + offsets.long()
        lowest, highest, num_different = int(ids.min()), int(ids.max()), len(set(ids.tolist()))
        if lowest < 0 or highest >= vocab or num_different < count:
            raise EngineError(
                f"{self._folder}: 'd2t' must map {count} tokens to different ones of the target's {vocab}, but maps "
                f"them to {num_different} from {lowest} to {highest}"
            )
        if weights.has("t2d"):
            weights.expect("t2d", vocab)
            mapped = weights.take_raw("t2d", None).bool()
            if not mapped[ids].all() or int(mapped.sum()) != count:
                raise EngineError(f"{self._folder}: 't2d' marks other tokens of the target than 'd2t' maps to")
        return to_device(ids, self._device_config.device)


def _refuse_pickles(folder: Path) -> None:
    """Raise ``EngineError`` if the weights are there as a pickle alone."""
    pickles = sorted(folder.glob("*.bin"))
    if pickles and not list(folder.glob("*.safetensors")):
        raise EngineError(
            f"{pickles[0]} is a pickle, which could run code when it is read: convert it to "
            f"{folder / 'model.safetensors'} with safetensors.torch.save_file"
        )
