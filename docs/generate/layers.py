"""The order of the folders inside each package, from the import contracts in ``pyproject.toml``."""

from __future__ import annotations

import textwrap
import tomllib
from pathlib import Path


def text(pyproject: Path) -> str:
    """Return a block with a line for each package, bottom-up: ``a < b`` says that b may import a."""
    contracts = tomllib.loads(pyproject.read_text())["tool"]["importlinter"]["contracts"]
    lines = []
    for contract in contracts:
        if contract["type"] == "layers":
            for container in contract.get("containers", ["packages"]):
                names = " < ".join(_group(layer) for layer in reversed(contract["layers"]))
                lines.append(textwrap.fill(names, 88, initial_indent=f"{container:14}", subsequent_indent=" " * 14))
    return "```text\n" + "\n".join(sorted(lines, key=lambda line: not line.startswith("packages"))) + "\n```\n"


def _group(layer: str) -> str:
    names = [name.strip(" ()") for name in layer.replace(":", "|").split("|")]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"
