"""Keys and values that the rows of a draft level attend to, whose numbers are on the device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels.common.paged_keys import PagedKeys


class DraftKeys(NamedTuple):
    """Paged keys and values of some branches. Each branch has equally many rows, one branch after the other."""

    cache: PagedKeys
    pages: Tensor
    """int32 ``[branches, any]`` page table."""
    ends: Tensor
    """int64 ``[branches]``: numbers of keys."""
    positions: Tensor
    """int64 ``[rows]``: a row sees the keys up to its position."""
    sees: Tensor | None = None
    """int32 ``[rows, words]``: instead, bit ``i % 32`` of word ``i // 32`` is 1 if a row sees key ``i``."""
