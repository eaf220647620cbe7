"""Options of a quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.protocol.types import EngineError

METHODS = {"rtn": (8, 4), "gptq": (4, 8), "awq": (4,), "fp8": (8,), "nf4": (4,)}
"""Numbers of bits that each method supports, its default first."""
_DEFAULT_GROUP_SIZE = 128


@dataclass(frozen=True, slots=True)
class Options:
    """Options that are checked together. Raises ``EngineError`` if they contradict each other."""

    method: str
    bits: int
    group_size: int | None = None
    """Columns that share a scale; -1: all; ``None``: one scale for a row, with activations in 8 bits too (W8A8), or
    the format's own blocks."""
    calibration: Path | None = None
    """Text like the one the model will read: a plain text, or a .jsonl file with an object with "text" on each line."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise EngineError(f"method {self.method!r} is not supported; choose one of {', '.join(METHODS)}")
        supported_bits = METHODS[self.method]
        if self.bits not in supported_bits:
            raise EngineError(f"{self.method} in {self.bits} bits is not supported; supported: {supported_bits}")
        if self.group_size is not None and self.method in ("fp8", "nf4"):
            raise EngineError(f"{self.method} has blocks of its own; leave out the group size")
        if self.group_size is not None and self.group_size != -1 and self.group_size < 1:
            raise EngineError(f"the group size is {self.group_size}; it must be 1 or more, or -1 for whole rows")
        if self.needs_calibration and self.calibration is None:
            raise EngineError(f"{self.method} needs a calibration file")

    @property
    def needs_calibration(self) -> bool:
        """True if the method observes the layers' inputs."""
        return self.method in ("gptq", "awq")


def create_options(method: str, bits: int | None, group_size: int | None, calibration: Path | None) -> Options:
    """Return options with the method's defaults for arguments that are ``None``. Raises ``EngineError``."""
    bits = METHODS.get(method, (8,))[0] if bits is None else bits
    is_grouped = method in ("gptq", "awq") or (method == "rtn" and bits == 4)
    return Options(method, bits, _DEFAULT_GROUP_SIZE if is_grouped and group_size is None else group_size, calibration)


def resolve_group_size(options: Options, columns: int) -> int:
    """Return the number of columns in a group of a matrix with ``columns`` columns."""
    return columns if options.group_size is None or options.group_size == -1 else options.group_size
