"""One turn of the wheel: search with a policy, export its rollouts, train it on them, and measure it again."""

from __future__ import annotations

from pathlib import Path

WORK = Path(__file__).parent / "work"
