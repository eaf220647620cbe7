"""How the bundled models were made, from data to weights; README.md has the commands in order."""

from __future__ import annotations

from pathlib import Path

WORK = Path(__file__).parent / "work"
SHIPPED = Path(__file__).parents[2] / "reasoner" / "bundled"
