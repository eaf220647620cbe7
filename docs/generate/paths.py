"""Write ``docs/contributing/paths.md``: where modules were before they moved into folders by subject.

``python -m docs.generate.paths`` reads the history of the repository, so the page is committed.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from docs.generate.tables import code, table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contributing" / "paths.md"
FIRST = "f2e0e70"
"""The first commit of the move."""
PACKAGES = ("kernels", "engine", "prm", "reasoner", "workers", "api")
_BRACES = re.compile(r"\{(.*?) => (.*?)\}")


def moves() -> dict[str, str]:
    """Return the path that each module moved to, by its old path."""
    command = ["git", "log", "--reverse", "-M40%", "--summary", "--format=", f"{FIRST}^..HEAD"]
    origins: dict[str, str] = {}
    for line in subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        if match := re.match(r" rename (.*) \(\d+%\)$", line):
            old, new = _sides(match[1])
            origins[new] = origins.pop(old, old)
    return {old: new for new, old in origins.items() if old != new}


def _sides(rename: str) -> tuple[str, str]:
    if "{" not in rename:
        old, _, new = rename.partition(" => ")
        return old, new
    return _BRACES.sub(r"\1", rename).replace("//", "/"), _BRACES.sub(r"\2", rename).replace("//", "/")


def _now(path: str) -> str:
    return code(path) if (ROOT / path).exists() else f"{code(path)}, since then split, merged or removed"


def main() -> None:
    found = sorted(moves().items())
    parts = [
        "# Moved modules\n",
        "Modules live in folders by subject; this is where each one was before. Import paths inside the packages are "
        "not a public interface: `reasoner.client` and the names in [Python API](../reference/python.md) are what "
        "programs import. A module that was split is listed by its largest part.\n",
    ]
    for package in PACKAGES:
        rows = [(code(old), _now(new)) for old, new in found if old.startswith(f"{package}/") and old.endswith(".py")]
        if rows:
            parts += [f"## {package}\n", table(("old path", "new path"), rows)]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(parts).rstrip() + "\n")


if __name__ == "__main__":
    main()
