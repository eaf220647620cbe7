"""What a checkpoint is to be quantised to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.protocol.types import EngineError

METHODS = {"rtn": (8, 4), "gptq": (4, 8), "awq": (4,), "fp8": (8,), "nf4": (4,)}
"""The bits that each method knows, its default first."""
_GROUP = 128


@dataclass(frozen=True, slots=True)
class Options:
    """Raises ``EngineError`` for what does not go together."""

    method: str
    bits: int
    group_size: int | None = None
    """Columns that share a scale; -1: all; ``None``: one scale for a row, with activations in 8 bits too (W8A8), or
    the format's own blocks."""
    calibration: Path | None = None
    """Text that the model is to be good at: a plain text, or with the ending .jsonl an object with "text" a line."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise EngineError(f"method {self.method!r} is not known; known are {', '.join(METHODS)}")
        known = METHODS[self.method]
        if self.bits not in known:
            raise EngineError(f"{self.method} in {self.bits} bits is not supported; supported: {known}")
        if self.group_size is not None and self.method in ("fp8", "nf4"):
            raise EngineError(f"{self.method} has blocks of its own; leave the group size out")
        if self.group_size is not None and self.group_size != -1 and self.group_size < 1:
            raise EngineError(f"the group size is {self.group_size}; it must be 1 or more, or -1 for whole rows")
        if self.calibrated and self.calibration is None:
            raise EngineError(f"{self.method} needs a calibration file")

    @property
    def calibrated(self) -> bool:
        """Whether the method looks at what the layers are given."""
        return self.method in ("gptq", "awq")


def options(method: str, bits: int | None, group_size: int | None, calibration: Path | None) -> Options:
    """With the method's defaults for what is ``None``. Raises ``EngineError``."""
    bits = METHODS.get(method, (8,))[0] if bits is None else bits
    grouped = method in ("gptq", "awq") or (method == "rtn" and bits == 4)
    return Options(method, bits, _GROUP if grouped and group_size is None else group_size, calibration)


def group(options: Options, columns: int) -> int:
    """Columns of a group in a matrix of so many."""
    return columns if options.group_size is None or options.group_size == -1 else options.group_size
