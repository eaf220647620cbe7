"""Training of drafters for a target model on texts that it generates; README.md has the commands."""

from __future__ import annotations

from pathlib import Path

WORK = Path(__file__).parent / "work"
