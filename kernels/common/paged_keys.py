"""The keys and values of one layer's paged cache, as the attention kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """One layer's cache. A quantized key or value is multiplied by the scale of its token and head."""

    keys: Tensor
    """``[kv_heads, pages, page_size, head_dim]``: float32, float16, bfloat16, float8_e4m3fn or int8; or of 4
    bits, ``[kv_heads, pages, page_size, head_dim / 2]`` of type ``INT4``. The pages of each head are contiguous; the
    heads may have any stride."""
    values: Tensor
    """As ``keys``."""
    key_scales: Tensor | None = None
    """``[kv_heads, pages, page_size]`` float32, if the keys are of 8 bits; float16 ``[kv_heads, pages, page_size,
    head_dim / 32]``, if they are of 4."""
    value_scales: Tensor | None = None
    """As ``key_scales``."""

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
