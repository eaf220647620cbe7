"""The weights of a DFlash head, and what its layers compute around any attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from engine.attention.layer import HeadShape
from engine.models.interface import Model
from engine.speculation.drafters.dflash.config import DFlashConfig, SelectorConfig
from engine.speculation.drafters.draft_layer import Attend
from engine.speculation.drafters.head_config import product
from engine.weights.safetensors import Weights
from kernels.common.rotary import rotary
from kernels.layers.activation import silu_mul
from kernels.layers.norm import rms_norm

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of positions, see ``rotary_tables``."""


class DFlashHead:
    """All parts of a head."""

    def __init__(self, folder: Path, config: DFlashConfig, model: Model) -> None:
        """Read the weights. Raises ``EngineError`` that names what is missing, damaged or left over."""
        weights, hidden = Weights(folder), config.hidden_size
        reader = _Reader(weights, config, model)
        self._eps = config.norm_eps
        self._fuse = reader.product({"fc": hidden}, len(config.target_layers) * hidden)
        self._feature_norm = reader.norm("hidden_norm", hidden)
        self.layers = [DFlashLayer(reader, f"layers.{index}.") for index in range(len(config.attention))]
        self._norm = reader.norm("norm", hidden)
        self.selector = None if config.selector is None else Selector(reader, config.selector)
        weights.finish()

    def fuse(self, states: Tensor) -> Tensor:
        """Return the features ``[tokens, hidden]`` of hidden states of the target's layers, side by side."""
        return rms_norm(self._fuse(states), self._feature_norm, self._eps)

    def normalize(self, hidden: Tensor) -> Tensor:
        """Return final hidden states as the output projection reads them."""
        return rms_norm(hidden, self._norm, self._eps)


class DFlashLayer:
    """One layer."""

    def __init__(self, reader: _Reader, prefix: str) -> None:
        config, hidden = reader.config, reader.config.hidden_size
        shape: HeadShape = config.key_shapes[0]
        attention, mlp, self._shape, self._eps = f"{prefix}self_attn.", f"{prefix}mlp.", shape, config.norm_eps
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        parts = {f"{attention}q_proj": queries, f"{attention}k_proj": keys, f"{attention}v_proj": keys}
        weight, bias = reader.matrix(parts, hidden, has_bias=config.has_bias)
        self._qkv = product(weight, bias)
        self._keys_and_values = product(weight[queries:], None if bias is None else bias[queries:])
        query_norm, self._key_norm = (reader.norm(f"{attention}{name}_norm", shape.head_dim) for name in "qk")
        self._qk_norm = torch.stack([query_norm] * shape.heads + [self._key_norm] * shape.kv_heads)
        self._output = product(*reader.matrix({f"{attention}o_proj": hidden}, queries, has_bias=config.has_bias))
        self._input_norm = reader.norm(f"{prefix}input_layernorm", hidden)
        self._mlp_norm = reader.norm(f"{prefix}post_attention_layernorm", hidden)
        self._gate_up = reader.product(
            {f"{mlp}{name}_proj": config.intermediate_size for name in ("gate", "up")}, hidden
        )
        self._down = reader.product({f"{mlp}down_proj": hidden}, config.intermediate_size)
        self._convolutions = (
            None
            if config.selector is None
            else tuple(Convolution(reader, f"{prefix}{name}_conv.", config.selector) for name in ("attention", "mlp"))
        )

    def project_features(self, features: Tensor, angles: Angles) -> Tensor:
        """Return the keys and values of positions of the text, ``[tokens, 2 * kv_heads, head_dim]``."""
        rows = self._keys_and_values(features).view(len(features), -1, self._shape.head_dim)
        keys = rms_norm(rows[:, : self._shape.kv_heads].contiguous(), self._key_norm, self._eps)
        return torch.cat((rotary(keys.float(), *angles).to(rows.dtype), rows[:, self._shape.kv_heads :]), dim=1)

    def __call__(self, hidden: Tensor, angles: Angles, size: int, attend: Attend) -> Tensor:
        """Return the hidden states ``[tokens, hidden]`` after the layer, of blocks of ``size`` tokens each."""

        def mix(x: Tensor) -> Tensor:
            heads, both = self._shape.heads, self._shape.heads + self._shape.kv_heads
            qkv = self._qkv(x).view(len(x), -1, self._shape.head_dim)
            qk = rms_norm(qkv[:, :both].contiguous(), self._qk_norm, self._eps)
            qk = rotary(qk.float(), *angles).to(qkv.dtype)
            return self._output(attend(qk[:, :heads], qk[:, heads:], qkv[:, both:]))

        def feed_forward(x: Tensor) -> Tensor:
            return self._down(silu_mul(self._gate_up(x)))

        for index, (norm, part) in enumerate(((self._input_norm, mix), (self._mlp_norm, feed_forward))):
            normed = rms_norm(hidden, norm, self._eps)
            around = self._convolutions[index] if self._convolutions else None
            hidden = hidden + (part(normed) if around is None else around(normed, size, part))
        return hidden


class Convolution:
    """Two causal convolutions around a part of a layer, whose filters are constants plus a function of the position.

    A channel's own constants are added to numbers that a group of channels shares.
    """

    def __init__(self, reader: _Reader, prefix: str, sizes: SelectorConfig) -> None:
        hidden = reader.config.hidden_size
        self._sizes = sizes
        groups = hidden // sizes.group
        self._constants = reader.tensor(f"{prefix}base_kernel", 2, sizes.width, hidden)
        self._filters = reader.product({f"{prefix}kernel_projection": 2 * sizes.width * groups}, hidden)

    def __call__(self, x: Tensor, size: int, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``part`` of the convolved rows ``[blocks * size, hidden]``, convolved again."""
        before, after = self._filters(x).view(-1, size, 2, self._sizes.width, x.shape[1] // self._sizes.group).unbind(2)
        mixed = part(self._convolve(x, before, self._constants[0]))
        return self._convolve(mixed, after, self._constants[1])

    def _convolve(self, x: Tensor, filters: Tensor, constants: Tensor) -> Tensor:
        """Return blocks of rows convolved.

        ``filters``: ``[blocks, size, width, groups]``; ``constants``: ``[width, hidden]``.
        """
        blocks, size, width, _ = filters.shape
        rows, total = x.view(blocks, size, -1), torch.zeros_like(x).view(blocks, size, -1)
        for distance in range(min(width, size)):
            factors = filters[:, :, distance].repeat_interleave(self._sizes.group, dim=2) + constants[distance]
            total[:, distance:] += factors[:, distance:] * rows[:, : size - distance]
        return total.view_as(x)


class Selector:
    """The part of DFlash 2 that lets a draft token depend on the one before it."""

    def __init__(self, reader: _Reader, sizes: SelectorConfig) -> None:
        self._top_k = sizes.top_k
        self._before, self._after = (
            reader.tensor(f"candidate_selector.{name}_codebook", reader.vocab_size, sizes.rank)
            for name in ("predecessor", "successor")
        )
        self._project = reader.product({"candidate_selector.hidden_projection": sizes.rank}, reader.config.hidden_size)

    def open(self, hidden: Tensor, logits: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function from rows and the tokens before their positions to the logits ``[rows, vocab]``.

        ``hidden``: ``[positions, hidden]``, normalised; ``logits``: ``[positions, vocab]`` without regard to the tokens
        before. Tokens that are not candidates of a position have a logit of minus infinity.
        """
        positions = self._project(hidden)
        scores, candidates = logits.topk(min(self._top_k, logits.shape[1]), dim=1)

        def weigh(rows: Tensor, tokens: Tensor) -> Tensor:
            some = candidates[rows]
            vectors = self._before[tokens] * positions[rows]
            fits = (self._after[some] @ vectors[:, :, None]).squeeze(2).float()
            whole = logits.new_full((len(rows), logits.shape[1]), -torch.inf)
            return whole.scatter(1, some, scores[rows] + fits)

        return weigh


class _Reader:
    """Reads a head's tensors onto the target's device."""

    def __init__(self, weights: Weights, config: DFlashConfig, model: Model) -> None:
        self.config, self.vocab_size = config, model.config.vocab_size
        self._weights, self._device_config = weights, model.device_config

    def norm(self, name: str, size: int) -> Tensor:
        # float32 on every device, as the target's.
        return self._weights.take(f"{name}.weight", size).to(self._device_config.device)

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._device_config.convert(self._weights.take(name, *shape))

    def matrix(self, parts: dict[str, int], columns: int, *, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        """Return matrices of these names and numbers of rows, one below the other, and their biases."""
        weight = torch.cat([self._weights.take(f"{name}.weight", rows, columns) for name, rows in parts.items()])
        convert = self._device_config.convert
        if not has_bias:
            return convert(weight), None
        bias = torch.cat([self._weights.take(f"{name}.bias", rows) for name, rows in parts.items()])
        return convert(weight), convert(bias)

    def product(self, parts: dict[str, int], columns: int) -> Callable[[Tensor], Tensor]:
        """Return the product with matrices of these names and numbers of rows, one below the other."""
        return product(*self.matrix(parts, columns, has_bias=False))
