"""How a process reward model is made from rollouts and measured; README.md has the commands."""

from __future__ import annotations

from pathlib import Path

WORK = Path(__file__).parent / "work"
SHIPPED = Path(__file__).parents[2] / "reasoner" / "bundled"
