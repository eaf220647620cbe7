"""The keys and values of one layer's paged cache, as the attention kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """One layer's cache. Where it is quantized, a key is its number times the scale of its token and head."""

    keys: Tensor
    """``[kv_heads, pages, page_size, head_dim]``: float32, float16, bfloat16, float8_e4m3fn or int8. Heads may lie
    anywhere, a head's pages follow each other."""
    values: Tensor
    key_scales: Tensor | None = None
    """``[kv_heads, pages, page_size]`` float32, of 8-bit keys."""
    value_scales: Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ``ValueError`` where scales and types do not fit, or a head's keys do not follow each other or are
        more numbers than the kernel counts."""
        narrow = self.keys.element_size() == 1
        if narrow != (self.key_scales is not None) or narrow != (self.value_scales is not None):
            raise ValueError(f"keys of type {self.keys.dtype} {'need' if narrow else 'cannot have'} scales")
        if not (self.keys[0].is_contiguous() and self.values[0].is_contiguous()):
            raise ValueError(f"the keys of a head have strides {self.keys.stride()[1:]}: they must follow each other")
        if self.keys[0].numel() >= 1 << 31:
            raise ValueError(f"a head has {self.keys[0].numel()} numbers in its keys; the kernel counts to {1 << 31}")
