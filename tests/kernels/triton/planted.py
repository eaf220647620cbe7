"""Kernels with planted bugs, to show that the tests detect them."""

from __future__ import annotations

import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from unittest.mock import patch


def planted(where: str, right: str, wrong: str, user: str, folder: Path) -> ModuleType:
    """Return the module ``user`` of ``kernels.triton`` with ``right`` replaced by ``wrong`` in the module ``where``.

    ``where`` is ``user`` or a module that it imports. Raises ``ValueError`` unless ``right`` is there, once or more."""
    source = _source(where)
    if right not in source:
        raise ValueError(f"{where} has no {right!r}")
    bad = _load(where, source.replace(right, wrong), folder)
    if user == where:
        return bad
    with patch.dict(sys.modules, {f"kernels.triton.{where}": bad}):
        return _load(user, _source(user), folder)


def _source(name: str) -> str:
    path = importlib.import_module(f"kernels.triton.{name}").__file__
    assert path is not None
    return Path(path).read_text()


def _load(name: str, source: str, folder: Path) -> ModuleType:
    """Import from a file, because Triton reads the source of its kernels."""
    path = folder / f"planted_{name}.py"
    path.write_text(source)
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
