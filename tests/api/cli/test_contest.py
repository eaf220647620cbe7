"""``reasoner contest``: what it refuses before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli.entry.app import app

GOOD = "id,problem\na,1+1?\nb,2+2?\n"


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        (GOOD, "--tokens 63", "63 tokens do not pay for one solution of each of 2 problems: give at least 64"),
        (GOOD, "--tokens 399 --max-tokens 200", "give at least 400, a solution of 200 tokens each"),
        (GOOD, "--tokens 0", "--tokens"),
        (GOOD, "--tokens 9999 --hours 0", "--hours"),
        (GOOD, "--tokens 9999 --strategy greedy,beam", "give one strategy"),
        (GOOD, "--tokens 9999 --strategy nonsense", "nonsense"),
        (GOOD, "--tokens 9999 --verifier nonsense", "--verifier"),
        (GOOD, "--tokens 9999 --modulo 0", "--modulo"),
        ("id,problem\na,1+1?\na,2+2?\n", "--tokens 9999", "line 3, field 'id'"),
        ("id,problem\na,1+1?\nb,\n", "--tokens 9999", "line 3, field 'problem'"),
        ("id,problem\n", "--tokens 9999", "no problems"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    text: str, options: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("problems.csv").write_text(text)
    run = CliRunner().invoke(app, ["contest", "problems.csv", *options.split()], env={"COLUMNS": "400"})
    assert run.exit_code == 2
    assert told in run.output
    assert [path.name for path in tmp_path.iterdir()] == ["problems.csv"]


def test_an_unknown_file_names_the_suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(app, ["contest", "nowhere.csv", "--tokens", "9999"], env={"COLUMNS": "400"})
    assert run.exit_code == 2
    assert "nowhere.csv" in run.output
