"""Sizes of the layers with a gated delta rule in Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.cache.state_layers import StateLayer
from engine.protocol.types import EngineError

FIELDS = frozenset(
    {
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads", "full_attention_interval", "layer_types"),
    }
)


_RATES = "in_proj_b", "in_proj_a"


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Sizes of a layer with a gated delta rule, the same in all such layers of a model."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution reads, its own included."""
    is_interleaved: bool
    """True if the checkpoint has the rows of queries, keys, values and gates together, those of each key head in a row
    (Qwen3-Next)."""
    are_rates_interleaved: bool
    """The same of the two numbers that each value head's rates are made of."""
    has_tiled_values: bool = False
    """True if value heads that share a key head are ``key_heads`` apart (in GGUF files), not beside each other."""

    @property
    def channels(self) -> int:
        """Channels of the convolution: all queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def projections(self) -> dict[str, int]:
        """Names of the matrices of the layer's input, and their numbers of rows."""
        values, heads = self.value_heads * self.value_dim, self.value_heads
        wide = {"in_proj_qkv": self.channels, "in_proj_z": values}
        if self.is_interleaved:
            wide = {"in_proj_qkvz": self.channels + values}
        return wide | ({"in_proj_ba": 2 * heads} if self.are_rates_interleaved else dict.fromkeys(_RATES, heads))

    @property
    def state(self) -> StateLayer:
        """The inputs of the convolution before the next token, and a matrix for each value head."""
        return StateLayer(
            ((self.width - 1, self.channels), (self.value_heads, self.key_dim, self.value_dim)),
        )


def read_delta(fields: dict[str, Any], *, is_interleaved: bool) -> DeltaConfig:
    """Read the sizes from a config. Raises ``EngineError`` for sizes that do not fit together."""
    sizes = DeltaConfig(
        key_heads=int(fields["linear_num_key_heads"]),
        value_heads=int(fields["linear_num_value_heads"]),
        key_dim=int(fields["linear_key_head_dim"]),
        value_dim=int(fields["linear_value_head_dim"]),
        width=int(fields["linear_conv_kernel_dim"]),
        is_interleaved=is_interleaved,
        are_rates_interleaved=is_interleaved,
    )
    numbers = sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim
    if min(numbers) < 1 or sizes.width < 2 or sizes.value_heads % sizes.key_heads:
        raise EngineError(
            f"{sizes.value_heads} value heads of {sizes.value_dim} on {sizes.key_heads} key heads of {sizes.key_dim} "
            f"with a convolution over {sizes.width} tokens are no linear attention's shape"
        )
    return sizes
