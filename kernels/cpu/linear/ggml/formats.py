"""Block formats of GGUF files (https://github.com/ggml-org/ggml, ``ggml-common.h``), and how a block is taken apart.

A weight is ``scale * (code - zero) + minimum``, or ``scale * table[code]``. The scale, and the minimum of formats that
have one, belong to a block of 32 columns; or they are those of a block of 256 columns times small integers for each 16
or 32 of them. Formats of 4-bit floats (E2M1) have a power of two for 32 columns (MXFP4,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf), or an 8-bit float for each 16
of them and one number for each row (NVFP4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kernels.cpu.runtime.kernel import function

GROUP = 32
"""Columns for which the rows of ``x`` have one unit, in every format."""
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Levels of the formats IQ4."""
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The numbers of 4-bit floats, doubled; scales are halved instead."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block format, and how its parts are arranged in a panel."""

    name: str
    size: int
    """Bytes of a block."""
    planes: tuple[int, ...]
    """Bits of a code that lie together, beginning with the lowest: ``(4, 1)`` is four bits, and elsewhere a fifth."""
    unpack: Callable[..., None]
    """``unpack(block, codes, factors)`` writes the codes of a block's columns, and its factors."""
    columns: int = GROUP
    """Columns of a block."""
    scale_at: int = 0
    """Offset of the block's scale."""
    minimum_at: int | None = None
    """Offset of the block's minimum, a float16."""
    subtracts_minimum: bool = False
    zero: int = 0
    num_scales: int = 1
    """Scales of a group: 2 if 16 columns share one."""
    factors: int = 0
    """Bytes of a group that hold the factors of its scales and minimums, int8 each, the scales' first."""
    has_nibble_factors: bool = False
    """Each byte of the factors holds a scale's in its lower and a minimum's in its upper half."""
    table: tuple[int, ...] | None = None
    """Level of each code. ``zero`` is added to it, so that it is an unsigned byte."""
    scale_type: Literal["float16", "e8m0", "e4m3"] = "float16"
    """``e8m0``: the exponent of a power of two, of which the scale is half. ``e4m3``: the factors are twice the scales,
    without a sign, and each row has one number more, by which its results are multiplied."""

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's scale, and of its minimum."""
        return {"float16": 2, "e8m0": 1, "e4m3": 0}[self.scale_type]

    @property
    def has_row_scales(self) -> bool:
        """True if the results of each row are multiplied by a number of its own."""
        return self.scale_type == "e4m3"

    @property
    def groups(self) -> int:
        """Groups of a block."""
        return self.columns // GROUP

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return sum(self.planes)

    @property
    def largest(self) -> int:
        """The largest unsigned byte that is multiplied."""
        return (1 << self.bits) - 1 if self.table is None else max(self.table) + self.zero


@function
def _unpack_nibbles(packed: Any, codes: Any) -> None:
    """Read 16 bytes, whose lower halves are columns 0 to 15 and whose upper halves are columns 16 to 31."""
    words, quads = packed[:16].view(np.uint32), codes[:32].view(np.uint32)
    for i in range(4):
        quads[i] = words[i] & np.uint32(0x0F0F0F0F)
        quads[4 + i] = (words[i] >> np.uint32(4)) & np.uint32(0x0F0F0F0F)


@function
def _add_fifth_bits(packed: Any, codes: Any) -> None:
    """Read 4 bytes with a bit for each of 32 columns."""
    bits, quads = packed[:4].view(np.uint32)[0], codes[:32].view(np.uint32)
    for i in range(8):
        # The product has the four bits 7, 14 and 21 places further on, too: one of each in the lowest bit of a byte.
        four = (bits >> np.uint32(4 * i)) & np.uint32(15)
        quads[i] |= ((four * np.uint32(0x00204081)) & np.uint32(0x01010101)) << np.uint32(4)


@function
def _add_bits(packed: Any, codes: Any, shift: int) -> None:
    """Read 32 bytes, whose bit b belongs to columns 32 * b to 32 * b + 31, and is the codes' bit ``shift``."""
    words, quads = packed[:32].view(np.uint32), codes[:256].view(np.uint32)
    for bit in range(8):
        for i in range(8):
            quads[8 * bit + i] |= ((words[i] >> np.uint32(bit)) & np.uint32(0x01010101)) << np.uint32(shift)


@function
def _unpack_q4_0(block: Any, codes: Any, _factors: Any) -> None:
    _unpack_nibbles(block[2:], codes)


@function
def _unpack_q4_1(block: Any, codes: Any, _factors: Any) -> None:
    _unpack_nibbles(block[4:], codes)


@function
def _unpack_q5_0(block: Any, codes: Any, _factors: Any) -> None:
    _unpack_nibbles(block[6:], codes)
    _add_fifth_bits(block[2:], codes)


@function
def _unpack_q5_1(block: Any, codes: Any, _factors: Any) -> None:
    _unpack_nibbles(block[8:], codes)
    _add_fifth_bits(block[4:], codes)


@function
def _unpack_q8_0(block: Any, codes: Any, _factors: Any) -> None:
    for i in range(32):
        codes[i] = block[2 + i] ^ 128


@function
def _unpack_pairs_of_bits(packed: Any, codes: Any) -> None:
    """Read twice 32 bytes, each with two bits of the columns i, 32 + i, 64 + i and 96 + i."""
    words, quads = packed[:64].view(np.uint32), codes[:256].view(np.uint32)
    for half in range(2):
        for part in range(4):
            for i in range(8):
                pairs = words[8 * half + i] >> np.uint32(2 * part)
                quads[32 * half + 8 * part + i] = pairs & np.uint32(0x03030303)


@function
def _unpack_q2_k(block: Any, codes: Any, factors: Any) -> None:
    for i in range(16):
        factors[i] = block[i]
    _unpack_pairs_of_bits(block[16:], codes)


@function
def _unpack_q3_k(block: Any, codes: Any, factors: Any) -> None:
    _unpack_pairs_of_bits(block[32:], codes)
    _add_bits(block, codes, 2)
    for i in range(16):
        low = (block[96 + (i & 7)] >> (4 * (i >> 3))) & 15
        high = (block[104 + (i & 3)] >> (2 * (i >> 2))) & 3
        factors[i] = (low | (high << 4)) - 32


@function
def _unpack_six_bits(packed: Any, factors: Any) -> None:
    """Read 12 bytes: 6 bits for the scale and for the minimum of each of 8 groups."""
    for i in range(4):
        scale, minimum, rest = packed[i], packed[4 + i], packed[8 + i]
        factors[2 * i], factors[2 * i + 1] = scale & 63, minimum & 63
        factors[8 + 2 * i] = (rest & 15) | ((scale >> 2) & 48)
        factors[8 + 2 * i + 1] = (rest >> 4) | ((minimum >> 2) & 48)


@function
def _unpack_halves(packed: Any, codes: Any) -> None:
    """Read four times 32 bytes, whose lower halves are 32 columns and whose upper halves are the next 32."""
    words, quads = packed[:128].view(np.uint32), codes[:256].view(np.uint32)
    for part in range(4):
        for i in range(8):
            word = words[8 * part + i]
            quads[16 * part + i] = word & np.uint32(0x0F0F0F0F)
            quads[16 * part + 8 + i] = (word >> np.uint32(4)) & np.uint32(0x0F0F0F0F)


@function
def _unpack_q4_k(block: Any, codes: Any, factors: Any) -> None:
    _unpack_six_bits(block[4:], factors)
    _unpack_halves(block[16:], codes)


@function
def _unpack_q5_k(block: Any, codes: Any, factors: Any) -> None:
    _unpack_six_bits(block[4:], factors)
    _unpack_halves(block[48:], codes)
    _add_bits(block[16:], codes, 4)


@function
def _unpack_q6_k(block: Any, codes: Any, factors: Any) -> None:
    _unpack_pairs_of_bits(block[128:], codes)
    words, quads = block[:128].view(np.uint32), codes[:256].view(np.uint32)
    for half in range(2):
        for i in range(16):
            word, at = words[16 * half + i], 32 * half + i
            quads[at] = (quads[at] << np.uint32(4)) | (word & np.uint32(0x0F0F0F0F))
            upper = (word >> np.uint32(4)) & np.uint32(0x0F0F0F0F)
            quads[at + 16] = (quads[at + 16] << np.uint32(4)) | upper
    for i in range(16):
        factors[i] = block[192 + i]


@function
def _unpack_iq4_xs(block: Any, codes: Any, factors: Any) -> None:
    high = np.int32(block[2]) | (np.int32(block[3]) << 8)
    for group in range(8):
        low = (block[4 + (group >> 1)] >> (4 * (group & 1))) & 15
        factors[group] = (low | (((high >> (2 * group)) & 3) << 4)) - 32
        _unpack_nibbles(block[8 + 16 * group :], codes[32 * group :])


@function
def _unpack_mxfp4(block: Any, codes: Any, _factors: Any) -> None:
    _unpack_nibbles(block[1:], codes)


@function
def _unpack_nvfp4(block: Any, codes: Any, factors: Any) -> None:
    """Read the scales of 16 columns each, then 8 bytes for each, whose lower halves are the first 8 of its columns."""
    for part in range(4):
        # Llama.cpp reads no sign, and this one code, which is no number, as 0.
        factors[part] = 0 if block[part] == 127 else block[part] & 127
        for i in range(8):
            byte = block[4 + 8 * part + i]
            codes[16 * part + i], codes[16 * part + 8 + i] = byte & 15, byte >> 4


FORMATS = {
    block_format.name: block_format
    for block_format in (
        BlockFormat("Q4_0", 18, (4,), _unpack_q4_0, zero=8),
        BlockFormat("Q4_1", 20, (4,), _unpack_q4_1, minimum_at=2),
        BlockFormat("Q5_0", 22, (4, 1), _unpack_q5_0, zero=16),
        BlockFormat("Q5_1", 24, (4, 1), _unpack_q5_1, minimum_at=2),
        BlockFormat("Q8_0", 34, (8,), _unpack_q8_0, zero=128),
        BlockFormat(
            *("Q2_K", 84, (2,), _unpack_q2_k, 256, 80, 82), subtracts_minimum=True, num_scales=2, factors=2,
            has_nibble_factors=True,
        ),
        BlockFormat("Q3_K", 110, (2, 1), _unpack_q3_k, 256, 108, zero=4, num_scales=2, factors=2),
        BlockFormat("Q4_K", 144, (4,), _unpack_q4_k, 256, 0, 2, subtracts_minimum=True, factors=2),
        BlockFormat("Q5_K", 176, (4, 1), _unpack_q5_k, 256, 0, 2, subtracts_minimum=True, factors=2),
        BlockFormat("Q6_K", 210, (4, 2), _unpack_q6_k, 256, 208, zero=32, num_scales=2, factors=2),
        BlockFormat("IQ4_NL", 18, (4,), _unpack_q4_0, zero=128, table=_IQ4),
        BlockFormat("IQ4_XS", 136, (4,), _unpack_iq4_xs, 256, zero=128, factors=1, table=_IQ4),
        BlockFormat("MXFP4", 17, (4,), _unpack_mxfp4, scale_type="e8m0", zero=12, table=_E2M1),
        BlockFormat(
            *("NVFP4", 36, (4,), _unpack_nvfp4, 64), scale_type="e4m3", zero=12, num_scales=2, factors=2,
            table=_E2M1,
        ),
    )
}  # fmt: skip
"""Block formats by name."""
