"""Common parts of heads on the target's hidden states: their configuration, and the states that they start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.cache.page_table import PageTable
from engine.cache.paged_kv import KVCache
from engine.device import DeviceConfig, to_device
from engine.models.config import read_json
from engine.models.config_fields import refuse_unknown
from engine.models.interface import Model
from engine.models.rope import Rope, read_rope
from engine.protocol.types import EngineError
from engine.speculation.drafter import DraftRequest, StepResult
from kernels.linear.fp32 import Linear

_DEFAULT_THETA = 10_000.0
"""Base of the rotary embedding where a config has none, as in the code of all public formats."""
_SMALL = 1 << 18
"""Maximum number of elements of a small matrix: 1 MiB, which fits into a core's second-level cache."""


def read_head_config(folder: Path, kind: str, model: Model, numbers: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a head's ``config.json``: ``kind``, ``hidden_size``, ``vocab_size`` and ``numbers``.

    Raises ``EngineError`` if it is of another kind, has other fields, or does not fit the target, with the two numbers.
    """
    path = folder / "config.json"
    fields = read_json(path)
    if fields.get("kind") != kind:
        raise EngineError(f"{path}: the kind is {fields.get('kind')!r}, not {kind!r}")
    known = {"kind", "hidden_size", "vocab_size", *numbers}
    if unknown := sorted(fields.keys() - known):
        raise EngineError(f"{path} has fields that a head of kind {kind!r} does not: {', '.join(unknown)}")
    for name in sorted(known - {"kind"}):
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise EngineError(f"{path}: {name} must be a number above 0, but is {value!r}")
    fits(path, "hidden_size", fields["hidden_size"], model.config.hidden_size)
    fits(path, "vocab_size", fields["vocab_size"], model.config.vocab_size)
    return fields


def fits(path: Path, name: str, ours: int, target: int) -> None:
    """Raise ``EngineError`` unless a number of the head's configuration is the target's."""
    if ours != target:
        raise EngineError(f"{path}: {name} is {ours}, but the target model's is {target}")


def read_count(path: Path, fields: dict[str, Any], name: str) -> int:
    """Return a field that must be a whole number above 0."""
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise EngineError(f"{path}: {name} must be a whole number above 0, but is {value!r}")
    return value


def read_head_rope(path: Path, fields: dict[str, Any], head_dim: int) -> Rope:
    """Return the rotary embedding of a head's layers. Raises ``EngineError`` that names the file."""
    try:
        return read_rope(fields, head_dim, theta=_DEFAULT_THETA, partial=False)
    except EngineError as error:
        raise EngineError(f"{path}: {error}") from None


def refuse_unknown_fields(path: Path, fields: dict[str, Any], known: set[str]) -> None:
    """Raise ``EngineError`` that names the file, see ``refuse_unknown``."""
    try:
        refuse_unknown(fields, known)
    except EngineError as error:
        raise EngineError(f"{path}: {error}") from None


def product(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return ``x @ weight.T + bias`` as a function, with ``F.linear`` for a small matrix.

    Drafts need no bitwise reproducibility, and for a few rows of a small matrix ``Linear`` takes up to five times as
    long. ``weight``: ``[out, in]``, ``bias``: ``[out]``."""
    return Linear(weight, bias) if weight.numel() > _SMALL else lambda x: F.linear(x, weight, bias)


def readout(model: Model) -> Callable[[Tensor], Tensor]:
    """Return ``Model.compute_logits`` up to rounding, by one product where the head is small."""
    hidden = model.config.hidden_size
    if hidden * model.config.vocab_size > _SMALL or model.device_config.uses_gpu_kernels:
        return model.compute_logits
    # The logits of a vector depend on its direction alone, and are linear in it.
    matrix = model.compute_logits(torch.eye(hidden)).T.contiguous()

    def read(x: Tensor) -> Tensor:
        return F.linear(x / torch.linalg.vector_norm(x, dim=-1, keepdim=True), matrix)

    probe = torch.linspace(-1, 2, 3 * hidden).view(3, hidden).sin()
    return (
        read if torch.allclose(read(probe), model.compute_logits(probe), rtol=1e-3, atol=1e-3) else model.compute_logits
    )


class LastStates:
    """The last hidden state of each running branch, in a table with a row for each row of the page table.

    Memory is bounded, and a branch that lost its pages has none until it is computed again."""

    def __init__(self, cache: KVCache, width: int, device_config: DeviceConfig) -> None:
        rows = len(cache.page_table)
        self._vectors = torch.zeros(rows, width, dtype=device_config.dtype, device=device_config.device)
        # NumPy reads and writes a few rows fastest.
        self._array = None if device_config.uses_gpu_kernels else self._vectors.numpy()
        self._tables: list[PageTable | None] = [None] * rows
        self._positions = [0] * rows

    def put(self, steps: Sequence[StepResult], vectors: Tensor, which: Sequence[int]) -> None:
        """Store the rows ``which`` of ``vectors`` ``[any, width]`` as the states of the last positions that the steps
        computed."""
        rows = [step.sequence.pages.row for step in steps]
        if self._array is not None:
            self._array[rows] = vectors.numpy()[which]
        else:
            indices = to_device(torch.tensor((rows, which)), vectors.device)
            self._vectors.index_copy_(0, indices[0], vectors[indices[1]])
        for row, step in zip(rows, steps, strict=True):
            self._tables[row] = step.sequence.pages
            self._positions[row] = step.first_position + len(step.rows) - 1

    def get(self, requests: Sequence[DraftRequest]) -> tuple[list[int], Tensor]:
        """Return the indices of the requests whose state before the last token is stored, and the states ``[found,
        width]``, on the model's device."""
        found = [index for index, request in enumerate(requests) if self._has_state(request)]
        rows = [requests[index].sequence.pages.row for index in found]
        if self._array is not None:
            return found, torch.from_numpy(self._array[rows])
        return found, self._vectors[to_device(torch.tensor(rows, dtype=torch.int64), self._vectors.device)]

    def _has_state(self, request: DraftRequest) -> bool:
        table = request.sequence.pages
        return self._tables[table.row] is table and self._positions[table.row] == len(request.sequence.tokens) - 2
