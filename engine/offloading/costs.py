"""Measured costs that decide whether a prefix is loaded or computed.

It is loaded if its bytes, at the seconds per byte of recent loads, take less time than its tokens, at the seconds per
token of recent steps with prompts. Until both are measured it is loaded. Each time loading loses, its estimate shrinks
by a fiftieth, so that a disk that was slow for a while is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.9
"""Weight of all earlier measurements beside a new one."""
_RETRY = 0.98
MIN_STEP_TOKENS = 32
"""Fewest tokens of a step that tells what a token of a prompt costs: smaller ones read the weights for few tokens."""


@dataclass(slots=True)
class _Rate:
    """Seconds per unit of recent work."""

    seconds: float = 0.0
    units: float = 0.0

    def add(self, units: float, seconds: float) -> None:
        self.seconds = self.seconds * _DECAY + seconds
        self.units = self.units * _DECAY + units

    def estimate(self, units: float) -> float | None:
        """Return the seconds of so much work; ``None`` before the first measurement."""
        return units * self.seconds / self.units if self.units else None


class Costs:
    """Seconds of recent loads and steps."""

    def __init__(self) -> None:
        self._token, self._read, self._copy = _Rate(), _Rate(), _Rate()

    def add_step(self, num_tokens: int, seconds: float) -> None:
        """Note a step; decode steps of few branches do not count."""
        if num_tokens >= MIN_STEP_TOKENS:
            self._token.add(num_tokens, seconds)

    def add_read(self, num_bytes: int, seconds: float) -> None:
        """Note a load from disk to memory."""
        self._read.add(num_bytes, seconds)

    def add_copy(self, num_bytes: int, seconds: float) -> None:
        """Note copies of pages into the cache."""
        self._copy.add(num_bytes, seconds)

    def is_load_cheaper(self, num_tokens: int, *, disk_bytes: int, num_bytes: int) -> bool:
        """Return True if a prefix should be loaded: ``num_bytes`` in all, of which ``disk_bytes`` come from disk."""
        computing = self._token.estimate(num_tokens)
        reading = self._read.estimate(disk_bytes) or 0.0
        copying = self._copy.estimate(num_bytes) or 0.0
        if computing is None or reading + copying < computing:
            return True
        self._read.seconds *= _RETRY
        self._copy.seconds *= _RETRY
        return False
