"""Tiny packages for tests of plug-ins: modules and a ``dist-info`` folder, as pip leaves them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from tests.docs.blocks import blocks

EntryPoints = Mapping[str, Mapping[str, str]]


def install(folder: Path, package: str, points: EntryPoints, modules: Mapping[str, str], version: str = "1.0") -> None:
    """Write a package into a folder; ``points`` are objects by group and name, ``modules`` sources by module."""
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    lines = [
        line
        for group, objects in points.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in objects.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def install_guide(folder: Path, page: Path, mark: str) -> None:
    """Write the package of a page: its ``pyproject.toml``, and its module, the block with the mark."""
    marked = {block.mark: block.code for block in blocks(page)}
    project = tomllib.loads(marked["package"])
    (module,) = project["tool"]["setuptools"]["py-modules"]
    about = project["project"]
    install(folder, about["name"], about["entry-points"], {module: marked[mark]}, about["version"])
