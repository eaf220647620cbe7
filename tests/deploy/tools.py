"""Programs of others that check what is deployed; a test that needs one is skipped where it cannot be had."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / os.environ.get("DEPLOY_ENVIRONMENT", "build/deploy")
"""The virtual environment of ``requirements.txt``."""


def find_prometheus(program: str) -> str:
    """Return the path of ``prometheus`` or ``promtool``, or skip the test."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed: apt-get install prometheus")
    return found


def find_tool(program: str) -> str:
    """Return the path of a program of ``requirements.txt``, or skip the test."""
    found = ENVIRONMENT / "bin" / program
    if not found.exists():
        pytest.skip(f"{program} is not installed: make {ENVIRONMENT.relative_to(ROOT)}/.installed")
    return str(found)
