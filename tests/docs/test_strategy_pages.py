"""Every strategy has a page with its paper, its defaults beside the paper's, and claims beside committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from docs.generate.claims import create_summary, create_table
from docs.generate.committed import DOCS, RESULTS
from docs.generate.committed import STRATEGIES as FOLDER
from docs.generate.tables import default_of
from reasoner.plugins import OWN_PACKAGE
from reasoner.strategies.registry import STRATEGIES, STRATEGY_PACKAGES

OWN = sorted(name for name, package in STRATEGY_PACKAGES.items() if package == OWN_PACKAGE)
SECTIONS = ["Paper", "Parameters", "Claim", "When to take it"]
MAX_LINES = 60


def read_section(page: str, name: str) -> str:
    return page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_every_strategy_has_a_page_and_no_other_is_there() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.md") if path.name != "index.md") == OWN


@pytest.mark.parametrize("name", OWN)
def test_a_page_has_its_sections_its_paper_and_its_claims(name: str) -> None:
    page = (FOLDER / f"{name}.md").read_text()
    assert page.startswith(f"# {name}\n")
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == SECTIONS
    paper = read_section(page, "Paper")
    arxiv = re.findall(r"\[arXiv:(\d{4}\.\d{5})\]\(https://arxiv\.org/abs/(\d{4}\.\d{5})\)", paper)
    assert all(shown == linked for shown, linked in arxiv)
    assert arxiv or "no arXiv id" in paper
    assert "<!-- claims: " in read_section(page, "Claim")
    assert len(page.splitlines()) <= MAX_LINES


@pytest.mark.parametrize("name", OWN)
def test_the_parameters_of_a_page_are_those_of_the_code(name: str) -> None:
    section = read_section((FOLDER / f"{name}.md").read_text(), "Parameters")
    fields: dict[str, Any] = STRATEGIES[name].params.model_json_schema().get("properties", {})
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.+) \|$", section, re.MULTILINE)
    assert [(field, default) for field, default, _ in rows] == [
        (field, " ".join(default_of(schema).split())) for field, schema in fields.items()
    ]


def test_the_pages_are_linked_from_the_reference_and_the_guide() -> None:
    reference = (DOCS / "reference" / "strategies.md").read_text()
    guide = (DOCS / "how-to" / "choose-a-strategy.md").read_text()
    assert [name for name in OWN if f"(../strategies/{name}.md)" not in reference] == []
    assert [name for name in OWN if f"(../strategies/{name}.md)" not in guide] == []


# The table of claims, from results made for the purpose.


def write_results(folder: Path, **document: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"comparisons": [], **document}))


def make_row(strategy: str, n: int, accuracy: float, tokens: float = 10.0) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "n": n,
        "accuracy": accuracy,
        "low": accuracy - 0.05,
        "high": accuracy + 0.05,
        "tokens": tokens,
        "verifier_tokens": 5.0,
    }


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows = [
        make_row("beam", 16, 0.5),
        make_row("vote", 16, 0.42, 20.0),
        make_row("vote", 64, 0.3),
        make_row("beam", 4, 0.41),
    ]
    pairs = [
        {"strategy": "beam", "n": 16, "over": "vote", "what": "equal n", "difference": 0.08, "low": 0.06, "high": 0.1},
        {
            "strategy": "beam",
            "n": 16,
            "over": "vote",
            "what": "equal tokens",
            "difference": 0.1,
            "low": -0.1,
            "high": 0.3,
        },
    ]
    write_results(tmp_path / "one", rows=rows, comparisons=[{**pair, "note": ""} for pair in pairs])
    write_results(tmp_path / "two", rows=[make_row("vote", 16, 0.2)])
    return tmp_path


@pytest.mark.parametrize(
    ("claim", "cells"),
    [
        ("one beam@16 > vote@16", ("+8.0 (+6.0 – +10.0)", "holds")),
        ("one vote@16 > beam@16", ("\u22128.0 (\u221210.0 – \u22126.0)", "does not hold")),
        ("one beam@4 > vote@16", ("\u22121.0 (\u22128.1 – +6.1, unpaired)", "not clear")),
        ("one beam@4 ~ vote@16", ("\u22121.0 (\u22128.1 – +6.1, unpaired)", "holds")),
        ("one beam@16 ~ vote@16", ("+8.0 (+6.0 – +10.0)", "does not hold")),
        ("one beam@16 > vote@64", ("+20.0 (+12.9 – +27.1, unpaired)", "holds")),
        ("one beam@16 > vote at equal tokens", ("+10.0 (\u221210.0 – +30.0)", "not clear")),
        ("one beam@16 < vote@16 in tokens", ("0.60 ×", "holds")),
        ("one vote@16 < beam@16 in tokens", ("1.67 ×", "does not hold")),
        ("one beam@16 > two vote@16", ("+30.0 (+22.9 – +37.1, unpaired)", "holds")),
    ],
)
def test_a_claim_is_judged_by_the_results(claim: str, cells: tuple[str, str], results: Path) -> None:
    assert create_table(claim, results).splitlines()[-1].endswith(f"| {' | '.join(cells)} |")


def test_a_claim_about_results_that_are_not_there_is_an_error(results: Path) -> None:
    with pytest.raises(LookupError, match="no mcts@16"):
        create_table("one mcts@16 > vote@16", results)
    with pytest.raises(LookupError, match="do not compare"):
        create_table("one beam@4 > vote at equal tokens", results)
    with pytest.raises(ValueError, match="not a claim: 'one beam beats vote'"):
        create_table("one beam beats vote", results)


def test_the_overview_counts_the_claims_of_every_page(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "beam.md"
    page.write_text("<!-- claims: one beam@16 > vote@16; one vote@16 > beam@16 -->\n<!-- end -->\n")
    assert create_summary([page], results).splitlines()[-1] == "| [beam](beam.md) | 1 |  | 1 |"


def test_every_claim_can_be_read() -> None:
    pages = [FOLDER / f"{name}.md" for name in OWN]
    assert len(create_summary(pages, RESULTS).splitlines()) == len(OWN) + 2
