"""Split-K: products whose inner dimension is cut into parts, and the sum of the parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_MAX_PARTS = 16
"""Writing and adding more parts costs more than they hide."""


@triton.jit
def _sum_parts(PARTS, BIAS, OUT, size, n, parts, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    total = tl.zeros([BLOCK], tl.float32)
    source = PARTS + offset
    for _ in range(0, parts):
        total += tl.load(source, mask=inside, other=0.0)
        source += size
    if HAS_BIAS:
        total += tl.load(BIAS + offset % n, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + offset, total.to(OUT.dtype.element_ty), mask=inside)


def sum_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the sum of float32 ``parts`` ``[parts, rows, n]``, in order, and ``bias`` to ``out`` ``[rows, n]``."""
    size = out.numel()
    _sum_parts[(triton.cdiv(size, _BLOCK),)](
        parts, parts if bias is None else bias, out, size, out.shape[1], len(parts),
        HAS_BIAS=bias is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def count_parts(x: Tensor, programs: int, steps: int, resident: int) -> int:
    """Return the number of parts of ``steps``, each of two steps or more.

    The number of parts times ``programs`` gives each multiprocessor about ``resident`` programs.
    """
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 132
    return max(1, min(_MAX_PARTS, resident * processors // programs, steps // 2))
