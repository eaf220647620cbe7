"""Invalid caches of paged attention are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.common.paged_keys import PagedKeys


def keys(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_8_bit_keys_need_scales_and_others_cannot_have_them() -> None:
    narrow, wide, scales = keys(2, 9, 4, 8, dtype=torch.int8), keys(2, 9, 4, 8), keys(2, 9, 4)
    PagedKeys(narrow, narrow, scales, scales)
    PagedKeys(wide, wide)
    with pytest.raises(ValueError, match=r"torch\.int8 need scales"):
        PagedKeys(narrow, narrow)
    with pytest.raises(ValueError, match=r"torch\.float16 cannot have scales"):
        PagedKeys(wide, wide, scales, scales)


def test_heads_may_have_any_stride_but_their_keys_are_contiguous() -> None:
    apart = keys(4, 9, 4, 8)[::2]
    PagedKeys(apart, apart)
    with pytest.raises(ValueError, match=r"strides \(64, 8, 1\)"):
        PagedKeys(*[keys(2, 9, 8, 8)[:, :, :4]] * 2)


def test_too_many_keys_for_32_bit_indices_are_refused() -> None:
    PagedKeys(*[keys(2, (1 << 20) - 1, 16, 128)] * 2)
    with pytest.raises(ValueError, match="2147483648 numbers"):
        PagedKeys(*[keys(2, 1 << 20, 16, 128)] * 2)
