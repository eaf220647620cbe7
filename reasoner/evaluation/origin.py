"""The origin of a result: command, version, commit and machine, so that others can make it again."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_GIT_SECONDS = 10.0


def describe_origin(command: str) -> dict[str, Any]:
    """Return the command with what it ran on; ``commit`` is ``None`` outside a checkout."""
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "version": version("reasoner"),
        "commit": find_commit(_ROOT),
        "processor": name_processor(),
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
    }


def find_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder, with ``-dirty`` after it if files were changed."""
    if not (folder / ".git").exists():  # an installed package may lie in a checkout of something else
        return None
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, or no commit
        return None
    return told.stdout.strip() or None


def name_processor() -> str:
    """Return the processor's name as Linux tells it, elsewhere its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
