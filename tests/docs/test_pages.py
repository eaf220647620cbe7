"""The documentation names settings, paths and strategies that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml

from engine.weights.formats import registry
from reasoner.strategies.registry import STRATEGIES
from tests.docs.blocks import ROOT, blocks, pages
from workers.config.settings import Settings

MAX_README_LINES = 150
OTHER_VARIABLES = {"URL", "API_KEY", "REDIS_API", "REDIS_WORKER"}
"""Variables of the command line and of ``compose.yaml``."""
GUIDE = ROOT / "docs" / "how-to" / "add-a-strategy.md"
WEIGHTS_GUIDE = GUIDE.with_name("add-a-weight-format.md")
_PATH = re.compile(
    r"(?<![\w/.:(-])((?:kernels|engine|prm|reasoner|workers|api|tests|recipes|benchmarks|examples|docs)/[\w./-]*[\w/])"
)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_settings_that_pages_name_exist() -> None:
    named = {name for page in pages() for name in re.findall(r"\bREASONER_(\w+)", page.read_text())}
    known = {name.upper() for name in Settings.model_fields} | OTHER_VARIABLES
    assert named - known == set()


def test_the_guide_names_every_strategy() -> None:
    page = (ROOT / "docs" / "how-to" / "choose-a-strategy.md").read_text()
    assert [name for name in STRATEGIES if f"| [`{name}`](" not in page] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_a_page_names_exist(page: Path) -> None:
    missing = [path for path in _PATH.findall(page.read_text()) if not (ROOT / path).exists()]
    assert [path for path in missing if not path.endswith("shortest.py")] == []


@pytest.mark.parametrize(
    "page", [page for page in pages() if "```diff" in page.read_text()], ids=lambda page: page.name
)
def test_a_diff_is_one_of_the_file_that_it_names(page: Path) -> None:
    for block in blocks(page):
        if block.language == "diff":
            lines = (ROOT / block.mark.removeprefix("diff: ")).read_text().splitlines()
            kept = [line[1:] for line in block.code.splitlines() if line.startswith((" ", "-")) and line != " …"]
            assert [line for line in kept if line not in lines] == []


async def test_the_strategy_of_the_guide_passes_its_own_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for mark, module in (("strategy", "guide_strategy"), ("strategy test", "guide_strategy_test")):
        (tmp_path / f"{module}.py").write_text(next(block.code for block in blocks(GUIDE) if block.mark == mark))
    monkeypatch.setitem(STRATEGIES, "shortest", importlib.import_module("guide_strategy").STRATEGY)
    await importlib.import_module("guide_strategy_test").test_the_shortest_solution_with_an_answer_wins()


def test_the_weight_format_of_the_guide_passes_its_own_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for mark, module in (("weight format", "guide_format"), ("weight format test", "guide_format_test")):
        code = next(block.code for block in blocks(WEIGHTS_GUIDE) if block.mark == mark)
        (tmp_path / f"{module}.py").write_text(code)
    format = registry.Format(importlib.import_module("guide_format").create_reader)
    monkeypatch.setitem(registry._FORMATS, "rows8", format)
    importlib.import_module("guide_format_test").test_rows_are_codes_times_their_scales(tmp_path)


def test_the_skill_has_the_front_matter_that_agents_look_for() -> None:
    """As the specification of agent skills says: the folder's name, and a description of at most 1024 characters."""
    page = ROOT / "docs" / "skills" / "ask-reasoner" / "SKILL.md"
    _, front, _ = page.read_text().split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields["name"] == page.parent.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert 0 < len(fields["description"]) <= 1024
