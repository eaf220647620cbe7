"""The examples of the documentation run as they are written, against one service."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT, blocks, pages, script
from tests.docs.conftest import RUN_SECONDS, Service

pytestmark = [
    pytest.mark.timeout(RUN_SECONDS + 150),
    pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here"),
]
RUNNABLE = [page for page in pages() if any(block.is_run for block in blocks(page))]
EXCUSES = ("not run: ", "strategy", "verifier", "scorer", "weight format")
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
QUICK = frozenset(
    ("README.md", "getting-started.md", "openai.md", "why-a-job-ended.md", "answers.md", "operate.md", "client.py")
)
"""Names of what ``make test`` runs; ``make test-long`` runs the others."""


def _is_long(path: Path) -> tuple[pytest.MarkDecorator, ...]:
    return () if path.name in QUICK else (pytest.mark.long,)


def _parameters(paths: list[Path]) -> list[Any]:
    return [pytest.param(path, id=str(path.relative_to(ROOT)), marks=_is_long(path)) for path in paths]


@pytest.mark.parametrize("page", _parameters(RUNNABLE))
def test_examples_of_a_page_run(page: Path, service: Service, tmp_path: Path) -> None:
    service.run("bash", "-c", script(page, service.url), cwd=tmp_path)


@pytest.mark.parametrize("path", _parameters(SCRIPTS))
def test_example_script_runs(path: Path, service: Service, tmp_path: Path) -> None:
    assert service.run("python", str(path), cwd=tmp_path)


def test_there_are_five_example_scripts() -> None:
    assert len(SCRIPTS) == 5
    assert all(f"({path.name})" in (ROOT / "examples" / "README.md").read_text() for path in SCRIPTS)


def test_every_block_that_is_not_run_says_why() -> None:
    for page in pages():
        for block in blocks(page):
            if block.language in ("bash", "python") and not block.is_run:
                assert block.mark.startswith(EXCUSES), (page, block.mark)
