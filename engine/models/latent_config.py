"""Sizes of multi-head latent attention in DeepSeek-V2 and V3 and in GLM-4.7-Flash, and of their indexers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.attention.layer import IndexerConfig, LayerAttentionConfig
from engine.models.config_fields import UnsupportedField
from engine.protocol.types import EngineError

FIELDS = frozenset(
    {
        *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim", "v_head_dim"),
        *("rope_interleave", "attention_bias"),
    }
)


INDEXER_FIELDS = frozenset(
    {
        *("index_topk", "index_head_dim", "index_n_heads", "indexer_types", "layer_types"),
        *("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
    }
)
"""Fields of architectures with sparse attention."""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434), the same in all layers.

    A token's key of one head is a rotated part, which all heads share, and a plain part, which is a product of the
    token's latent with a matrix of the head, as its value is. The cache holds the rotated part and the latent.
    """

    heads: int
    rank: int
    """Numbers of a latent."""
    query_rank: int | None
    """Numbers of the queries' own latent; ``None`` if queries are projected at once."""
    rotated: int
    """Rotated dimensions of a query or key."""
    plain: int
    """The other dimensions."""
    value_dim: int
    is_interleaved: bool
    """True if neighbouring dimensions are rotated together, else one of the first half with one of the second."""
    has_bias: bool
    """True if the first projections and the output have a bias."""
    indexer: IndexerConfig | None = None
    """The indexer that chooses the tokens that each query attends to; ``None``: it attends to all."""

    @property
    def projected(self) -> int:
        """Numbers that are projected of a token: the rotated part of its key, and its latent."""
        return self.rotated + self.rank

    @property
    def cached(self) -> int:
        """Numbers of a token in the cache: those, and the indexer's key."""
        return self.projected + (0 if self.indexer is None else self.indexer.head_dim)

    @property
    def query_width(self) -> int:
        """Numbers of all heads' queries."""
        return self.heads * (self.plain + self.rotated)

    def attention(self, fields: dict[str, Any]) -> LayerAttentionConfig:
        """Return the attention to the cache, in which a query is as wide as what is cached."""
        scale = (self.plain + self.rotated) ** -0.5 * _read_magnitude(fields) ** 2
        num_values = self.rank if self.indexer is None else None
        return LayerAttentionConfig(
            self.heads, 1, self.cached, scale, is_latent=True, num_values=num_values, indexer=self.indexer
        )


def read_latent(
    fields: dict[str, Any], *, is_interleaved: bool, indexer_is_interleaved: bool | None = None
) -> LatentConfig:
    """Read the sizes from a config. Raises ``EngineError`` for sizes that do not fit together.

    ``is_interleaved``: the architecture's value where the config has none. ``indexer_is_interleaved``: that of the
    indexer's vectors, of an architecture that has one.
    """
    sizes = LatentConfig(
        heads=int(fields["num_attention_heads"]),
        rank=int(fields["kv_lora_rank"]),
        query_rank=None if fields.get("q_lora_rank") is None else int(fields["q_lora_rank"]),
        rotated=int(fields["qk_rope_head_dim"]),
        plain=int(fields["qk_nope_head_dim"]),
        value_dim=int(fields["v_head_dim"]),
        is_interleaved=bool(fields.get("rope_interleave", is_interleaved)),
        has_bias=bool(fields.get("attention_bias")),
        indexer=None if indexer_is_interleaved is None else _read_indexer(fields, indexer_is_interleaved),
    )
    numbers = sizes.heads, sizes.rank, sizes.query_rank or 1, sizes.rotated, sizes.plain, sizes.value_dim
    if min(numbers) < 1 or sizes.rotated % 2 or fields.get("num_key_value_heads") not in (None, sizes.heads):
        raise EngineError(
            f"{sizes.heads} heads of {sizes.plain} plain and {sizes.rotated} rotated dimensions, with values of "
            f"{sizes.value_dim}, {fields.get('num_key_value_heads')} key-value heads and a latent of {sizes.rank} "
            "numbers are no latent attention's shape"
        )
    if sizes.has_bias and sizes.query_rank is None:
        raise UnsupportedField("attention_bias without q_lora_rank is not supported for this architecture")
    return sizes


def _read_indexer(fields: dict[str, Any], is_interleaved: bool) -> IndexerConfig:
    """Read the sizes of the indexer. Raises ``EngineError`` for sizes that do not fit together."""
    num_layers = int(fields["num_hidden_layers"])
    heads, dim, top_k = (int(fields[name]) for name in ("index_n_heads", "index_head_dim", "index_topk"))
    if fields.get("q_lora_rank") is None or min(heads, top_k) < 1 or dim < int(fields["qk_rope_head_dim"]):
        raise EngineError(
            f"{heads} heads of {dim} dimensions, {fields['qk_rope_head_dim']} of them rotated, that choose {top_k} "
            f"tokens by a query of {fields.get('q_lora_rank')} numbers are no indexer's shape"
        )
    if set(fields.get("layer_types") or ()) - {"indexed_attention"}:
        raise UnsupportedField(f"layer_types is {fields['layer_types']}; only 'indexed_attention' is supported")
    types = _read_indexer_types(fields, num_layers)
    if len(types) != num_layers or set(types) - {"full", "shared"} or types[:1] == ["shared"]:
        raise EngineError(f"indexer_types must be {num_layers} of 'full' and 'shared', 'full' first, but is {types}")
    layers = frozenset(index for index, kind in enumerate(types) if kind == "full")
    return IndexerConfig(heads, dim, top_k, is_interleaved, layers=layers)


def _read_indexer_types(fields: dict[str, Any], num_layers: int) -> list[str]:
    """Return for each layer whether it has an indexer, by the field or by the pattern or the distance that it follows
    from."""
    if fields.get("indexer_types") is not None:
        return list(fields["indexer_types"])
    if (pattern := fields.get("index_topk_pattern")) is not None:
        return [{"F": "full", "S": "shared"}.get(str(kind), str(kind)) for kind in pattern]
    distance = max(int(fields.get("index_topk_freq") or 1), 1)
    offset = int(fields.get("index_skip_topk_offset", 2))
    return ["shared" if max(layer - offset + 1, 0) % distance else "full" for layer in range(num_layers)]


def _read_magnitude(fields: dict[str, Any]) -> float:
    """Return the factor that a stretched rotary embedding gives queries and keys, besides that of its tables."""
    settings = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    kind = settings.get("rope_type") or settings.get("type") or "default"
    factor, share = float(settings.get("factor") or 1.0), float(settings.get("mscale_all_dim") or 0.0)
    return 1.0 if kind == "default" or factor <= 1 else 0.1 * share * math.log(factor) + 1.0
