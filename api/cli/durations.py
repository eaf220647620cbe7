"""Durations and moments as people write them on a command line."""

from __future__ import annotations

import re
import time
from datetime import datetime

import typer

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
LATEST = 1e11
"""Seconds since 1970 that still are a time: three thousand years on."""


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration such as 90d, 12h or 30m, or None if it is none."""
    found = re.fullmatch(r"(\d{1,9})([smhdw])", text)
    return None if found is None else float(found[1]) * _UNITS[found[2]]


def moment(text: str, option: str) -> float:
    """Return the seconds since 1970 of a duration before now, a date, a date with a time, or such a number.

    A date without a time zone is one of this machine. Raises ``typer.BadParameter``, which names the option.
    """
    ago = seconds_of(text)
    if ago is not None:
        return max(0.0, time.time() - ago)
    try:
        then = float(text)
    except ValueError:
        try:
            then = datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError, OSError):
            then = -1.0
    if not 0 <= then <= LATEST:
        raise typer.BadParameter(
            f"{text!r} is no time: write 2d (or 90s, 30m, 12h, 1w), 2026-01-31, 2026-01-31T12:00 or seconds since 1970",
            param_hint=option,
        )
    return then
