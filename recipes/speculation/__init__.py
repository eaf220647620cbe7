"""How drafters are trained for a target model, from its own texts to weights; README.md has the commands."""

from __future__ import annotations

from pathlib import Path

WORK = Path(__file__).parent / "work"
