"""The layers of LFM2: some with attention, the others with a gated convolution over a few tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.cache.state_layers import LayerStates
from engine.models.decoder import Layer, LayerBuilder
from engine.models.feed_forward import GatedMlp
from kernels.common.quantization import Rows
from kernels.layers.elementwise import multiply
from kernels.recurrent.convolution import causal_convolution


@dataclass(frozen=True, slots=True)
class ConvolutionLayer(Layer):
    """A layer with a gated convolution. ``qkv`` projects the inputs' gates, the results' gates and the inputs."""

    filters: Tensor
    """``[width, hidden]``."""

    def project(self, hidden: Tensor, normed: Rows | None = None) -> Tensor:
        """Return the projections ``[tokens, 3 * hidden]``, the rows of ``qkv``."""
        return self._project(hidden, normed)

    def mix_states(self, rows: Tensor, states: LayerStates) -> Tensor:
        """Return the output ``[tokens, hidden]`` of projections, and write the layer's state after the tokens."""
        before, after, x = rows.chunk(3, dim=1)
        [history] = states.layers[self.index]
        mixed = causal_convolution(multiply(before, x), self.filters, history, states.segments, activate=False)
        return multiply(after, mixed)


class ConvolutionBuilder(LayerBuilder):
    """Builds the layers of both kinds."""

    final_norm = "model.embedding_norm"

    def layer(self, index: int) -> Layer:
        config, prefix = self._config, f"model.layers.{index}."
        hidden, query, key = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
        has_state = index in config.state_layers
        mixer = f"{prefix}{'conv' if has_state else 'self_attn'}."
        parts = {"in_proj": 3 * hidden} if has_state else {"q_proj": query, "k_proj": key, "v_proj": key}
        common: dict[str, Any] = {
            "config": config,
            "index": sum((other in config.state_layers) == has_state for other in range(index)),
            "input_norm": self.norm(f"{prefix}operator_norm"),
            "qkv": self.product({mixer + name: rows for name, rows in parts.items()}, hidden, bias=False),
            "qk_norm": None if has_state else self._qk_norm(mixer, "{}_layernorm"),
            "projection_norms": None,
            "output": self.linear(f"{mixer}out_proj", hidden, hidden if has_state else query, bias=False),
            "output_norm": None,
            "mlp_norm": self.norm(f"{prefix}ffn_norm"),
            "mlp": self._mlp(prefix),
            "mlp_output_norm": None,
            "fuses_norms": False,
        }
        if not has_state:
            return Layer(**common)
        filters = self.constant(f"{mixer}conv.weight", hidden, 1, config.convolution_width or 1)
        return ConvolutionLayer(**common, filters=filters[:, 0].T.contiguous())

    def _mlp(self, prefix: str) -> GatedMlp:
        config, names = self._config, f"{prefix}feed_forward."
        gate_up = self.product(
            dict.fromkeys((f"{names}w1", f"{names}w3"), config.intermediate), config.hidden_size, bias=False
        )
        down = self.linear(f"{names}w2", config.hidden_size, config.intermediate, bias=False)
        return GatedMlp(gate_up, down, self._activation)
