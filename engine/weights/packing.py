"""Small unsigned numbers in int32 words, the first in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 32


def pack(codes: Tensor, bits: int) -> Tensor:
    """``codes``: ``[rows, n]`` of 0 … 2**bits - 1. Returns int32 ``[rows, ceil(n * bits / 32)]``."""
    each = _WORD // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each)).view(len(codes), -1, each)
    words = torch.zeros(codes.shape[:2], dtype=torch.int32, device=codes.device)
    for place in range(each):  # one after the other: all at once would need 32 bits for each number
        words |= codes[..., place].int() << (bits * place)
    return words


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` numbers of each row, uint8 ``[rows, count]``. ``words``: int32 ``[rows, ceil(count * bits /
    32)]``."""
    codes = (words[..., None] >> _shifts(bits).int()) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :count].to(torch.uint8)


def words_of(count: int, bits: int) -> int:
    """How many words ``count`` numbers take."""
    return -(-count * bits // _WORD)


def _shifts(bits: int) -> Tensor:
    return torch.arange(0, _WORD, bits)
