"""Installed packages inside the lockdown: numpy is imported before it, and sympy's modules are kept in memory.

sympy imports many of its modules on first use, when no file can be opened any more. Uses the standard library only,
since it runs in an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

EXTENSIONS = {
    "numpy": ("numpy.fft", "numpy.linalg", "numpy.ma", "numpy.polynomial", "numpy.random", "numpy._core._methods")
}
"""Packages with machine code, and modules that they import on first use."""
PURE = ("sympy", "mpmath")
NEEDED = {"sympy": ("sympy", "mpmath"), "mpmath": ("mpmath",)}
"""Packages that these import."""
STANDARD = (
    *("bisect", "cmath", "copy", "dataclasses", "decimal", "fractions", "heapq", "inspect", "numbers", "random"),
    *("statistics", "string", "textwrap", "timeit", "typing", "unicodedata", "weakref"),
)
"""Standard library modules that they import on first use."""
_PYC_HEADER = 16


def import_packages(names: Iterable[str]) -> None:
    """Import those of the modules ``names`` that are of these packages, where they are installed."""
    roots = {name.partition(".")[0] for name in names}
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    pure = [package for root in sorted(roots & set(PURE)) for package in NEEDED[root]]
    if pure:
        sys.meta_path.insert(0, InMemoryFinder(folders, pure))
    sys.path[len(sys.path) :] = folders
    try:
        for root in sorted(roots & EXTENSIONS.keys()):
            for name in (root, *EXTENSIONS[root]):
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
    finally:
        del sys.path[-len(folders) :]
    for name in (*STANDARD, *pure) if pure else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


class InMemoryFinder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds the modules of pure packages, whose compiled code it has read; their tests are left out."""

    def __init__(self, folders: Sequence[str], packages: Sequence[str]) -> None:
        self._code: dict[str, tuple[bytes, bool]] = {}
        """By the name of the module: its compiled code, and True for a package."""
        for folder in map(Path, folders):
            for package in packages:
                if (folder / package / "__init__.py").exists():
                    self._read_package(folder, package)

    def _read_package(self, folder: Path, package: str) -> None:
        for path in (folder / package).rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            if "tests" in parts or "benchmarks" in parts:
                continue
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            cached = Path(importlib.util.cache_from_source(str(path)))
            if cached.exists():
                code = cached.read_bytes()[_PYC_HEADER:]
            else:
                code = marshal.dumps(compile(path.read_bytes(), str(path), "exec", dont_inherit=True))
            self._code.setdefault(name, (code, is_package))

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname not in self._code:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=self._code[fullname][1])

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = marshal.loads(self._code[fullname][0])
        return code

    def get_source(self, fullname: str) -> None:  # noqa: ARG002
        return None

    def is_package(self, fullname: str) -> bool:
        return self._code[fullname][1]
