"""Read the header of a GGUF file: its metadata, and where its tensors lie.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the package ``gguf`` takes seconds
for a vocabulary, and may not end on a hostile file; so the header is read here, each length checked against the bytes
that are left.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from engine.gguf.paths import find_gguf_files
from engine.protocol.types import EngineError

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_LENGTH = struct.Struct("<Q")
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_LONGEST_NAME = 1 << 16


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Place and type of a tensor in its file."""

    path: Path
    shape: tuple[int, ...]
    """In torch's order: the last dimension is contiguous."""
    kind: GGMLQuantizationType
    data: memoryview
    """The blocks, mapped from the file."""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """Metadata and tensors of a model in one file or several splits."""

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


@contextmanager
def refuse_wrong_types(path: Path) -> Iterator[None]:
    """Raise ``EngineError`` where a value of the metadata has a type or a size that makes no sense."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError, IndexError) as error:
        raise EngineError(f"{path} has metadata of a wrong type or size: {error}") from None


def read_gguf(path: Path) -> GgufModel:
    """Read the header of a model; tensors stay in the mapped files. Raises ``EngineError`` naming what is wrong."""
    paths = find_gguf_files(path)
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for number, split in enumerate(paths):
        try:
            fields, found = _Header(split).read()
        except (struct.error, ValueError, OverflowError, OSError) as error:
            raise EngineError(f"{split} is not a readable GGUF file: {error}") from None
        with refuse_wrong_types(split):
            index, count = int(fields.get("split.no", number)), int(fields.get("split.count", 0)) or len(paths)
        if (index, count) != (number, len(paths)):
            raise EngineError(f"{split} is split {index + 1} of {count} in its metadata, which its name is not")
        metadata = fields | metadata
        if repeated := tensors.keys() & found.keys():
            raise EngineError(f"{split} has the tensor {min(repeated)!r} of another split")
        tensors |= found
    with refuse_wrong_types(path):
        expected = int(metadata.get("split.tensors.count", len(tensors)))
    if expected != len(tensors):
        raise EngineError(f"{path}: the splits have {len(tensors)} tensors, but should have {expected}")
    return GgufModel(paths, metadata, tensors)


class _Header:
    """Cursor over the header of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            # Torch takes writable memory alone; nothing is written, and so nothing copied.
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._take_bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._read_number("<I")
        if version not in _VERSIONS:
            swapped = struct.unpack("<I", struct.pack(">I", version))[0]
            kind = "big-endian" if swapped in _VERSIONS else f"version {version}"
            raise ValueError(f"it is {kind}; supported are little-endian files of version 2 and 3")
        num_tensors, num_fields = self._read_number("<Q"), self._read_number("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._read_name()
            if name in metadata:
                raise ValueError(f"it has the field {name!r} twice")
            metadata[name] = self._read_value(self._read_kind())
        places = [self._read_tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}; it must be a power of two")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        view = memoryview(self._bytes)
        for name, shape, kind, offset in places:
            if name in tensors:
                raise ValueError(f"it has the tensor {name!r} twice")
            block, size = GGML_QUANT_SIZES[kind]
            if offset % alignment or shape[-1] % block:
                raise ValueError(f"{name!r} is not aligned: offset {offset}, rows of {shape[-1]} in blocks of {block}")
            end = start + offset + math.prod(shape) // block * size
            if end > len(view):
                raise ValueError(f"{name!r} ends at byte {end}, but the file has {len(view)}: it is truncated")
            tensors[name] = GgufTensor(self._path, shape, kind, view[start + offset : end])
        return metadata, tensors

    def _read_tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, dimensions = self._read_name(), self._read_number("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"{name!r} has {dimensions} dimensions")
        shape = tuple(reversed(struct.unpack(f"<{dimensions}Q", self._take_bytes(8 * dimensions))))
        if 0 in shape:
            raise ValueError(f"{name!r} is empty: {shape}")
        number = self._read_number("<I")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"{name!r} has the unknown block type {number}") from None
        return name, shape, kind, self._read_number("<Q")

    def _read_value(self, kind: GGUFValueType) -> Any:
        """Return a value: a scalar, a text, a list of texts, or an array of numbers."""
        if kind == GGUFValueType.STRING:
            return self._read_text()
        if kind != GGUFValueType.ARRAY:
            return self._read_numbers(kind, 1)[0].item()
        items, count = self._read_kind(), self._read_number("<Q")
        if items == GGUFValueType.STRING:
            return self._read_texts(count)
        if items == GGUFValueType.ARRAY:
            raise ValueError("it has an array of arrays")
        return self._read_numbers(items, count)

    def _read_texts(self, count: int) -> list[str]:
        """Return an array of texts. A vocabulary has some 100,000, so nothing is called for each that need not be."""
        self._require_bytes(_LENGTH.size * count)
        texts, at, content = [], self._at, self._bytes
        for _ in range(count):
            (size,) = _LENGTH.unpack_from(content, at)
            at += _LENGTH.size + size
            if at > len(content):
                raise ValueError(f"a text ends at byte {at} of {len(content)}: it is truncated")
            texts.append(content[at - size : at].decode())
        self._at = at
        return texts

    def _read_numbers(self, kind: GGUFValueType, count: int) -> npt.NDArray[Any]:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take_bytes(dtype.itemsize * count), dtype)

    def _read_kind(self) -> GGUFValueType:
        return GGUFValueType(self._read_number("<I"))

    def _read_text(self) -> str:
        return self._take_bytes(self._read_number("<Q")).decode()

    def _read_name(self) -> str:
        size = self._read_number("<Q")
        self._require_bytes(size)
        if size > _LONGEST_NAME:
            raise ValueError(f"a name at byte {self._at} has {size} bytes; at most {_LONGEST_NAME} are allowed")
        return self._take_bytes(size).decode()

    def _read_number(self, form: str) -> int:
        (number,) = struct.unpack_from(form, self._bytes, self._at)
        self._at += struct.calcsize(form)
        return int(number)

    def _take_bytes(self, size: int) -> bytes:
        self._require_bytes(size)
        self._at += size
        return self._bytes[self._at - size : self._at]

    def _require_bytes(self, size: int) -> None:
        if size > len(self._bytes) - self._at:
            raise ValueError(f"{size} bytes are needed at byte {self._at} of {len(self._bytes)}: it is truncated")
