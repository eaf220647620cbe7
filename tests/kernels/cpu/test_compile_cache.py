"""Compiled kernels are cached in a writable folder, or kept in memory if there is none."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.runtime.compile_cache import SOURCES, find_cache


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Create the folder of a package."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "one.py").write_text("x = 1\n")
    return folder


def _lock(folder: Path) -> None:
    """Replace the path by a file, so that nothing can be written below it. Permissions would not stop root."""
    folder.touch()


def test_a_configured_folder_takes_precedence(sources: Path, tmp_path: Path) -> None:
    chosen = find_cache({"NUMBA_CACHE_DIR": str(tmp_path / "chosen"), "HOME": str(tmp_path)}, sources)
    assert chosen is not None
    assert chosen.parent == tmp_path / "chosen"
    assert chosen.is_dir()


def test_compiled_kernels_are_stored_beside_their_sources_or_in_the_users_cache(sources: Path, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path / "home")}
    beside = find_cache(home, sources)
    assert beside is not None
    assert beside.parent == sources / "__pycache__"
    shutil.rmtree(sources / "__pycache__")
    _lock(sources / "__pycache__")
    own = find_cache(home, sources)
    assert own is not None
    assert own.parent == tmp_path / "home" / ".cache" / "reasoner" / "kernels"
    moved = find_cache(home | {"XDG_CACHE_HOME": str(tmp_path / "xdg")}, sources)
    assert moved is not None
    assert moved.parent == tmp_path / "xdg" / "reasoner" / "kernels"


def test_changed_sources_get_another_folder(sources: Path) -> None:
    before = find_cache({}, sources)
    (sources / "one.py").write_text("x = 2\n")
    assert find_cache({}, sources) not in (before, None)


@pytest.mark.parametrize("environ", [{"NUMBA_CACHE_DIR": "LOCKED/chosen"}, {"HOME": "LOCKED"}, {}])
def test_a_missing_writable_folder_is_logged_once_with_advice(
    sources: Path, tmp_path: Path, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    _lock(tmp_path / "locked")
    _lock(sources / "__pycache__")
    environ = {name: value.replace("LOCKED", str(tmp_path / "locked")) for name, value in environ.items()}
    with caplog.at_level(logging.WARNING):
        assert find_cache(environ, sources) is None
    (record,) = caplog.records
    assert "compiled in memory" in record.message
    assert "set NUMBA_CACHE_DIR" in record.message


def test_kernels_run_in_a_read_only_installation(tmp_path: Path) -> None:
    shutil.copytree(SOURCES.parent, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    _lock(tmp_path / "kernels" / "cpu" / "__pycache__")
    code = (
        "import torch, kernels.cpu.layers.activation\n"
        "from kernels.cpu.sampling.draft_chain import gather_rows\n"
        "print(kernels.__file__, gather_rows(torch.arange(6.0).view(3, 2), torch.tensor([2, 0])).tolist())"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=env | {"HOME": "/dev/null", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(maxsplit=1) == [str(tmp_path / "kernels" / "__init__.py"), "[[4.0, 5.0], [0.0, 1.0]]\n"]
    assert done.stderr.count("compiled in memory") == 1
