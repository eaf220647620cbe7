"""The command line as a new user runs it: real processes, the bundled models, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.long import mostly_long

REASONER = [sys.executable, "-m", "api.cli.main"]
QUESTION = "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 45."
PATIENCE = 280.0
"""Seconds for a whole demo, on one core that is shared with other processes."""
NOBODY = "http://127.0.0.1:9"
BUNDLED = Path(__file__).parents[2] / "reasoner" / "bundled"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty temporary folder that shows what a command leaves behind. Its path is short, since sockets are created
    in it.
    """
    with tempfile.TemporaryDirectory(prefix="e2e") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        for name in [name for name in os.environ if name.startswith("REASONER_")]:
            monkeypatch.delenv(name)
        yield Path(folder)


@contextlib.contextmanager
def started(*arguments: str, home: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*REASONER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "140"},
        cwd=home,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(*arguments: str, home: Path) -> tuple[int, str, str]:
    with started(*arguments, home=home) as process:
        out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def until(condition: Callable[[], bool], what: str) -> None:
    pause, deadline = threading.Event(), time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        pause.wait(0.05)  # other processes do not signal their end, so poll


def processes_in(folder: Path) -> list[str]:
    """Return the command lines of live processes that name the folder or work in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                environment = (entry / "environ").read_bytes().decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if line and (str(folder) in line or f"TMPDIR={folder}" in environment):
                found.append(line)
    return found


def assert_nothing_left(home: Path) -> None:
    until(lambda: not processes_in(home), f"processes are left: {processes_in(home)}")
    until(lambda: not list(home.iterdir()), f"files are left: {list(home.iterdir())}")


def test_the_demo_solves_problems_by_several_strategies_and_leaves_nothing_behind(home: Path) -> None:
    status, out, err = run("demo", home=home)
    assert status == 0, err
    for strategy in ("greedy", "weighted_vote", "rebase", "particle", "self_consistency"):
        assert strategy in out
    assert len(re.findall(r"completed|incomplete", out)) >= 5
    assert re.search(r"\b(yes|no)\b", out)
    assert "search tree" in out
    assert_nothing_left(home)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_interrupted_demo_leaves_nothing_behind(home: Path, number: signal.Signals, status: int) -> None:
    with started("demo", home=home) as process:
        until(lambda: any("engine.server.app" in line for line in processes_in(home)), "the engine never started")
        os.kill(process.pid, number)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, err
    assert "Traceback" not in err
    assert_nothing_left(home)


def test_solve_prints_one_json_document_with_answer_and_bill(home: Path) -> None:
    status, out, err = run(
        "solve", QUESTION, "--strategy", "beam", "--n", "8", "--tokens", "3000", "--seed", "3", "--json", home=home
    )
    assert status == 0, err
    job = json.loads(out)
    assert job["status"] == "completed"
    assert job["result"]["answer"]
    assert job["spec"]["strategy"] == {"name": "beam", "n": 8, "expansions": 4, "max_steps": 40, "adaptive": True}
    assert 0 < job["usage"]["generated"] + job["usage"]["verifier_computed"] <= 3000
    assert_nothing_left(home)


@pytest.mark.long  # the chart of an evaluation is drawn in every run
def test_eval_bills_thoughts_and_limits_them(home: Path) -> None:
    chosen = ("--strategy", "greedy,self_consistency,first_finished:first=1", "--n", "1,2", "--thinking-tokens", "16")
    status, out, err = run(
        "eval", "countdown", "--limit", "3", "--model", "policy-thinking", *chosen, "--json", home=home
    )
    assert status == 0, err
    document = json.loads(out)
    assert document["settings"]["thinking_tokens"] == 16
    for row in document["rows"]:
        assert 0 < row["thought_tokens"] <= 16 * row["n"]
        assert row["thought_tokens"] < row["tokens"]
    thoughtless = ("eval", "countdown", "--limit", "1", "--strategy", "greedy", "--thinking-tokens", "9")
    status, _, err = run(*thoughtless, home=home)
    assert status == 1
    assert "model 'policy' has no known delimiters of thoughts" in " ".join(err.split())


def test_eval_prints_the_documented_json_and_draws_the_chart(home: Path) -> None:
    out_folder = home / "out"
    chosen = ("--strategy", "greedy,self_consistency,best_of_n,beam", "--n", "1,4", "--out", str(out_folder), "--json")
    status, out, err = run("eval", "words", "--limit", "6", *chosen, home=home)
    assert status == 0, err
    document = json.loads(out)
    assert (document["suite"], document["problems"]) == ("words", 6)
    fields = {"strategy", "n", "accuracy", "low", "high", "tokens", "verifier_tokens", "seconds"}
    assert all(set(row) >= fields for row in document["rows"])
    named = {(row["strategy"], row["n"]) for row in document["rows"]}
    assert {("greedy", 1), ("beam", 4), ("self_consistency", 4), ("pass@n", 4)} <= named
    assert json.loads((out_folder / "results.json").read_text()) == document
    assert (out_folder / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert "reasoner eval words --limit 6" in (out_folder / "table.md").read_text()
    status, again, err = run("eval", "words", "--limit", "6", *chosen, home=home)
    assert status == 0, err
    assert json.loads(again) == document
    assert "starting" not in err
    status, _, err = run("eval", "words", "--limit", "5", *chosen, home=home)
    assert status == 2
    assert "problems is 6 there and 5 here" in re.sub(r"[│\s]+", " ", err)


@pytest.mark.long
@pytest.mark.parametrize("command", [["solve", QUESTION, "--tokens", "200"], ["eval", "words", "--limit", "1"]])
def test_a_long_temporary_folder_name_is_supported(
    home: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / ("long" * 30)  # a socket's path has at most 107 bytes
    folder.mkdir()
    before = set(Path("/tmp").glob(f"reasoner-{os.getuid()}-*"))
    monkeypatch.setenv("TMPDIR", str(folder))
    status, _, err = run(*command, "--strategy", "greedy", home=home)
    assert status == 0, err
    until(lambda: not list(folder.iterdir()), f"files are left: {list(folder.iterdir())}")
    until(lambda: set(Path("/tmp").glob(f"reasoner-{os.getuid()}-*")) <= before, "a folder is left")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    mostly_long(
        [
            (("eval", "poems"), 2, "give countdown, words, arithmetic, extraction"),
            (("eval", __file__ + ".jsonl"), 2, "No such file"),
            (("eval", "words", "--strategy", "mtcs"), 2, "known are greedy"),
            (("eval", "words", "--n", "0"), 2, "numbers from 1 to 4096"),
            (("solve", QUESTION, "--tokens", "0"), 2, "greater than or equal to 1"),
            (("solve", QUESTION, "--n"), 2, "--NAME VALUE"),
            (("solve", QUESTION, "--strategy", "beem"), 2, "unknown strategy 'beem'; known are greedy"),
            (("solve", QUESTION, "--seconds", "inf", "--url", NOBODY), 2, "use finite numbers"),
            (("solve", "\udcff", "--url", NOBODY), 2, "text that UTF-8 can encode"),
            (("solve", QUESTION, "--url", NOBODY, "--key", "clé"), 2, "ASCII"),
            (("solve", QUESTION, "--url", "localhost:8000"), 2, "give http://HOST:PORT"),
            (("solve", QUESTION, "--picture", "tree.txt"), 2, "ends in .png"),
            (("solve", QUESTION, "--picture", "nowhere/tree.png"), 2, "in a folder that exists"),
            (("eval", "words", "--limit", "1", "--out", "/proc/out"), 1, "reasoner: /proc/out: No such file"),
            (("quantize", "policy", "out", "--method", "rtn", "--bits", "3"), 2, "supported: (8, 4)"),
            (("quantize", "nowhere", "out"), 2, "neither a bundled model"),
            (("quantize", str(BUNDLED / "policy"), "/proc/out"), 1, "No such file"),
            (("engine", "--threads", "100000"), 2, "less than or equal to 1024"),
            (("engine", "--kv-tokens", "10000000000000"), 1, "not enough memory"),
            (("serve", "--model", "/nowhere"), 2, "neither a bundled model"),
            (("serve", "--host", "0.0.0.0"), 2, "REASONER_API_KEYS"),
            (("jobs", "show", "job_x", "--url", NOBODY), 1, "no service answers"),
            (("frobnicate",), 2, "No such command"),
        ],
        every=5,
    ),
)
def test_wrong_usage_prints_one_clear_message_with_the_right_exit_status(
    home: Path, arguments: tuple[str, ...], status: int, message: str
) -> None:
    code, out, err = run(*arguments, home=home)
    assert code == status
    assert message in re.sub(r"[│\s]+", " ", err)
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.long  # a minute
def test_select_and_eval_rank_candidates_of_a_file_and_go_on_after_a_kill(home: Path) -> None:
    lines = [
        {
            "question": f"What is {n} + {n}?",
            "candidates": [f"\\boxed{{{m}}}" for m in (n, 2 * n, 2 * n)],
            "answer": 2 * n,
        }
        for n in range(3, 63)
    ]
    file = home / "given.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("select", str(file), "--by", "majority", "--out", str(home / "out"), "--json")
    rankings = home / "out" / "rankings.jsonl"
    with started(*arguments, home=home) as process:
        until(lambda: rankings.exists() and rankings.read_bytes().count(b"\n") > 9, "nothing was ranked")
        process.kill()
    before = rankings.read_bytes()
    assert before.count(b"\n") < len(lines)
    until(lambda: not processes_in(home / "out"), "the killed command is still there")
    status, out, err = run(*arguments, home=home)
    assert status == 0, err
    assert rankings.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    shown = {row["rule"]: row["right"] for row in json.loads(out)["accuracy"]}
    assert shown == {"first": 0, "majority": 60, "ranked": 60, "oracle": 60}
    status, out, err = run("eval", "--candidates", str(file), "--limit", "5", "--json", home=home)
    assert status == 0, err
    assert {row["rule"] for row in json.loads(out)["accuracy"]} == {
        *("first", "majority", "weighted", "best", "ranked", "oracle")
    }
    file.write_text('{"question": "?"}\n')
    status, _, err = run("select", str(file), home=home)
    assert (status, "needs 'candidates'" in " ".join(err.split())) == (2, True)
