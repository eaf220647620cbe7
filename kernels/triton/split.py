"""How products share the work among programs, and the sum of the parts when the inner dimension is cut too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_MOST = 16
"""Parts of one sum. To write and add up more costs more than they hide."""


@triton.jit
def _sum_parts(PARTS, BIAS, OUT, size, n, parts, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros([BLOCK], tl.float32)
    source = PARTS + place
    for _ in range(0, parts):
        total += tl.load(source, mask=inside, other=0.0)
        source += size
    if HAS_BIAS:
        total += tl.load(BIAS + place % n, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + place, total.to(OUT.dtype.element_ty), mask=inside)


def sum_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out`` ``[rows, n]`` becomes the sum of float32 ``parts`` ``[parts, rows, n]``, in their order, and ``bias``."""
    size = out.numel()
    _sum_parts[(triton.cdiv(size, _BLOCK),)](
        parts, parts if bias is None else bias, out, size, out.shape[1], len(parts),
        HAS_BIAS=bias is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def parts_for(x: Tensor, programs: int, steps: int, resident: int) -> int:
    """In how many parts to cut ``steps``, none with less than two, so that ``programs`` times as many give each
    multiprocessor of the GPU ``resident`` at once."""
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 132
    return max(1, min(_MOST, resident * processors // programs, steps // 2))
