"""The keys and values of one layer's paged cache, as the attention kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """One layer's cache. A quantized key or value is multiplied by the scale of its token and head."""

    keys: Tensor
    """``[kv_heads, pages, page_size, head_dim]``: float32, float16, bfloat16, float8_e4m3fn or int8; or of 4
    bits, ``[kv_heads, pages, page_size, head_dim / 2]`` of type ``INT4``. The pages of each head are contiguous; the
    heads may have any stride."""
    values: Tensor
    """As ``keys``; the same tensor if a token's vector is its key and its value, the same for all heads."""
    key_scales: Tensor | None = None
    """``[kv_heads, pages, page_size]`` float32, if the keys are of 8 bits; float16 ``[kv_heads, pages, page_size,
    head_dim / 32]``, if they are of 4."""
    value_scales: Tensor | None = None
    """As ``key_scales``."""
    num_values: int | None = None
    """Numbers at the end of a vector that are its value, if it is key and value; the others' results are undefined.
    ``None``: all numbers are."""

    @classmethod
    def of_layer(cls, kv: Tensor, scales: Tensor | None, num_groups: int, num_values: int | None = None) -> Self:
        """Return one layer of a cache, ``[kinds, kv_heads, pages, page_size, …]``.

        ``num_groups``: groups of query heads that are computed apart, if all of them read the one vector of a token.
        """
        if len(kv) == 2:
            return cls(*kv, *(() if scales is None else scales))
        vectors, factors = kv[0], None if scales is None else scales[0]
        return cls(vectors, vectors, factors, factors, num_values).regroup(num_groups)

    @property
    def is_latent(self) -> bool:
        """True if keys are values, too."""
        return self.values is self.keys

    def regroup(self, num_groups: int) -> Self:
        """Return keys that are values, too, as those of so many groups of query heads."""
        keys = self.keys[:1].expand(num_groups, *self.keys.shape[1:])
        scales = None if self.key_scales is None else self.key_scales[:1].expand(num_groups, *self.key_scales.shape[1:])
        return type(self)(keys, keys, scales, scales, self.num_values)

    def __post_init__(self) -> None:
        """Raises ``ValueError`` if scales and types disagree, or a head's keys are not contiguous or too many."""
        is_quantized = self.keys.element_size() == 1
        if is_quantized != (self.key_scales is not None) or is_quantized != (self.value_scales is not None):
            raise ValueError(f"keys of type {self.keys.dtype} {'need' if is_quantized else 'cannot have'} scales")
        if not (self.keys[0].is_contiguous() and self.values[0].is_contiguous()):
            raise ValueError(f"the keys of a head have strides {self.keys.stride()[1:]}: they must be contiguous")
        if self.keys[0].numel() >= 1 << 31:
            raise ValueError(
                f"the keys of a head are {self.keys[0].numel()} numbers; they must be fewer than {1 << 31}"
            )
