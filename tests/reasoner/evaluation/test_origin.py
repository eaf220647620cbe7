"""The origin of a result: the commit of a checkout, none outside of one, and a processor by name."""

from __future__ import annotations

import subprocess
from pathlib import Path

from reasoner.evaluation.origin import describe_origin, find_commit, name_processor


def run_git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_the_commit_of_a_checkout_is_named_and_marked_where_files_were_changed(tmp_path: Path) -> None:
    assert find_commit(tmp_path) is None
    run_git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    run_git(tmp_path, "add", "a")
    run_git(tmp_path, "commit", "-q", "-m", "first")
    commit = find_commit(tmp_path)
    assert commit is not None
    assert run_git(tmp_path, "rev-parse", "HEAD").startswith(commit)
    (tmp_path / "a").write_text("2")
    assert find_commit(tmp_path) == f"{commit}-dirty"


def test_an_origin_names_what_is_needed_to_make_a_result_again() -> None:
    origin = describe_origin("reasoner eval words")
    assert origin["command"] == "reasoner eval words"
    assert origin["processor"] == name_processor() != ""
    assert origin["cores"] >= 1
    assert {"date", "version", "commit", "python"} <= origin.keys()
