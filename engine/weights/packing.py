"""Pack small unsigned numbers into int32 words, the first in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 32


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack ``codes`` ``[rows, n]`` of 0 … 2**bits - 1 into int32 ``[rows, ceil(n * bits / 32)]``."""
    per_word = _WORD // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word)).view(len(codes), -1, per_word)
    words = torch.zeros(codes.shape[:2], dtype=torch.int32, device=codes.device)
    for index in range(per_word):  # one after the other: all at once would need 32 bits for each number
        words |= codes[..., index].int() << (bits * index)
    return words


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first ``count`` numbers of each row, uint8 ``[rows, count]``.

    ``words``: int32 ``[rows, ceil(count * bits / 32)]``.
    """
    codes = (words[..., None] >> torch.arange(0, _WORD, bits, dtype=torch.int32)) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :count].to(torch.uint8)


def num_words(count: int, bits: int) -> int:
    return -(-count * bits // _WORD)
