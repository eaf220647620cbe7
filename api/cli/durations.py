"""Durations and times on the command line."""

from __future__ import annotations

import re
import time
from datetime import datetime

import typer

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
MAX_TIME = 1e11
"""Latest time in seconds since 1970: three thousand years later."""


def parse_duration(text: str) -> float | None:
    """Return the seconds of a duration such as 90d, 12h or 30m, or None if the text is no duration."""
    match = re.fullmatch(r"(\d{1,9})([smhdw])", text)
    return None if match is None else float(match[1]) * _UNITS[match[2]]


def parse_time(text: str, option: str) -> float:
    """Return the seconds since 1970 for a duration before now, a date, a date with a time, or a number of seconds.

    A date without a time zone is local. Raises ``typer.BadParameter``, which names the option.
    """
    duration = parse_duration(text)
    if duration is not None:
        return max(0.0, time.time() - duration)
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError, OSError):
            seconds = -1.0
    if not 0 <= seconds <= MAX_TIME:
        raise typer.BadParameter(
            f"{text!r} is not a time: write 2d (or 90s, 30m, 12h, 1w), 2026-01-31, 2026-01-31T12:00 or "
            "seconds since 1970",
            param_hint=option,
        )
    return seconds
