"""An environment with the packages of ``pip install reasoner`` alone, made of links into the present one."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
_CUSTOMIZE = """
import os, sys
sys.path[:] = [os.environ["LIGHT_PACKAGES"] if path.endswith("site-packages") else path for path in sys.path]
"""
"""Python runs this file at start, in every child process too."""


def make_light_environment(folder: Path) -> dict[str, str]:
    """Return the variables with which Python finds the base dependencies alone, those of ``pyproject.toml``."""
    packages, start = folder / "packages", folder / "start"
    packages.mkdir()
    start.mkdir()
    (start / "sitecustomize.py").write_text(_CUSTOMIZE)
    for one in list_base_distributions():
        for top in {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = packages / top
            if not link.exists():
                link.symlink_to(Path(str(one.locate_file(top))))
    paths = [str(start), str(ROOT)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "LIGHT_PACKAGES": str(packages)}


def list_base_distributions() -> Iterator[Distribution]:
    """Yield the distributions that ``dependencies`` of ``pyproject.toml`` bring, each once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting, seen = [Requirement(text) for text in project["dependencies"]], set[tuple[str, frozenset[str]]]()
    while waiting:
        requirement = waiting.pop()
        key = re.sub(r"[-_.]+", "-", requirement.name).lower(), frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:
            continue  # for another platform
        yield found
        for text in found.requires or ():
            more = Requirement(text)
            extras = ["", *requirement.extras]
            if more.marker is None or any(more.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(more)
