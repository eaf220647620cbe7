"""Benchmark with a public model: the plan's commands, the sweep with an engine from a script, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real.plan import RealPlan, get_folder_name
from benchmarks.real.report import TaskResults, write_report
from benchmarks.real.sweep import SAMPLES, format_table, read_records, summarize, sweep
from benchmarks.real.tasks import CANDIDATES, TASKS
from reasoner.evaluation.runs import FinishedItem, Run, RunFile
from reasoner.evaluation.suites.registry import open_suite
from tests.scripted import ScriptedEngine


def run(strategy: str, n: int, problem: int, correct: float, tokens: float = 10.0) -> Run:
    return Run("m", strategy, n, 0, f"p{problem}", correct, correct, 1.0, n, tokens, 0.0, 0.0, 1.0, 0.1, correct, 0.0)


def make_runs(rights: dict[tuple[str, int], str]) -> list[Run]:
    """Return the runs of each case on problems whose letters are 1 (right) and 0."""
    return [
        run(*case, problem, float(letter), tokens=10.0 * case[1])
        for case, letters in rights.items()
        for problem, letter in enumerate(letters)
    ]


def test_measured_tasks_are_candidates_with_folders_of_their_own() -> None:
    assert set(TASKS) <= set(CANDIDATES)
    assert len(TASKS) >= 5
    names = [get_folder_name(task) for task in TASKS]
    assert len(set(names)) == len(TASKS)
    assert all(name == Path(name).name and "shots" not in name for name in names)


def test_searches_are_planned_only_with_a_probe() -> None:
    alone = RealPlan(Path("/m.gguf"), Path("out"), gsm8k=Path("g.jsonl"), training=0)
    verified = RealPlan(Path("/m.gguf"), Path("out"), training=9)
    trained, (fitted, calibrated) = verified.steps()[: len(TASKS)], verified.steps()[len(TASKS) : len(TASKS) + 2]
    assert [step.arguments[:3] for step in trained] == [("prm", "rollouts", task) for task in TASKS]
    assert fitted.arguments[:2] == ("prm", "train")
    assert calibrated.arguments[:2] == ("calibrate", ",".join(TASKS))
    for plan, names in ((alone, set()), (verified, {"best_of_n", "weighted_vote", "beam", "dvts", "mcts", "auto"})):
        evaluations = [step for step in plan.steps() if step.arguments[0] == "eval"]
        for step in evaluations:
            strategies = step.arguments[step.arguments.index("--strategy") + 1].split(",")
            assert {name.partition(":")[0] for name in strategies} == {"greedy", "self_consistency", "deepconf"} | names
            assert ("REASONER_PROBE" in step.environment) == ("REASONER_CALIBRATION" in step.environment) == bool(names)
    evaluated = [step.arguments for step in verified.steps() if step.arguments[0] == "eval"]
    assert ["auto:family=aiw" in ",".join(arguments) for arguments in evaluated] == [True, *[False] * (len(TASKS) - 1)]
    assert alone.steps()[-1].arguments[:2] == ("eval", "g.jsonl")
    assert len(alone.steps()) == len(TASKS) + 1


async def test_an_interrupted_sweep_continues_without_asking_again(tmp_path: Path) -> None:
    suite, path = open_suite("words", limit=3), tmp_path / "sweep.jsonl"
    await sweep(ScriptedEngine(), [suite], path, 1.0)
    first = path.read_text()
    records = read_records(path)
    assert {record["problem"] for record in records} == {problem.id for problem in suite.problems}
    assert all(len(record["samples"]) == SAMPLES for record in records)
    path.write_text(first[:-20])  # as a crash leaves it
    await sweep(ScriptedEngine(), [suite], path, 1.0)
    assert sorted(path.read_text().splitlines()) == sorted(first.splitlines())
    (summary,) = summarize(read_records(path))
    assert summary.problems == 3
    assert f"| `words` | 3 | {summary.greedy:.0%} |" in format_table([summary]).replace("**", "")


def test_a_suitable_task_is_neither_too_hard_nor_too_easy_and_its_samples_differ() -> None:
    def summary(samples: str) -> Any:
        made = [{"right": letter == "1", "answer": letter, "tokens": 1} for letter in samples]
        return summarize([{"task": "t", "greedy": made[0], "majority": False, "samples": made}])[0]

    assert summary("00010001").is_suitable
    assert not summary("00000000").is_suitable
    assert not summary("11111111").is_suitable
    assert not summary("11111110").is_suitable


def test_a_strategy_that_was_interrupted_is_left_out() -> None:
    runs = make_runs({("greedy", 1): "0110", ("dvts", 16): "11"})
    assert TaskResults("t", runs).scores.keys() == {("greedy", 1)}


def test_the_best_strategy_is_compared_with_greedy_and_corrected_for_the_choice() -> None:
    results = TaskResults(
        "t",
        make_runs(
            {
                ("greedy", 1): "0" * 10,
                ("self_consistency", 16): "1" + "0" * 9,
                ("weighted_vote", 16): "1" * 10,
                ("best_of_n", 16): "1" * 9 + "0",
                ("auto:family=t", 16): "1" * 9 + "0",
                ("pass@n", 16): "1" * 10,
            }
        ),
    )
    best, votes, auto = results.differences()
    assert (best.strategy, best.over, best.difference) == ("weighted_vote at 16", "greedy", 1.0)
    assert best.p == pytest.approx(3 * 2 / 2**10)  # ten equal differences, and a choice among three strategies
    assert (votes.strategy, votes.over) == ("weighted_vote at 16", "self_consistency at 16")
    assert votes.difference == pytest.approx(0.9)
    assert (auto.difference, auto.p) == (0.0, 1.0)
    assert auto.strategy == "auto at 16"
    assert "auto" in {row.strategy for row in results.rows}
    assert auto.tokens == pytest.approx(1.0)


def test_the_report_has_every_task_with_runs_a_table_and_a_chart(tmp_path: Path) -> None:
    runs = make_runs({("greedy", 1): "01", ("self_consistency", 1): "01", ("self_consistency", 16): "11"})
    for name in ("one", "two"):
        with RunFile({"suite": f"reasoning-gym:{name}?shots=4"}, tmp_path / name) as file:
            for problem in ("p0", "p1"):
                mine = tuple(one for one in runs if one.problem == problem)
                file.add(FinishedItem("s", 0, problem, mine))
            file.add(FinishedItem("s", 0, "p2", failed="too long"))
    write_report(tmp_path, "command")
    document = json.loads((tmp_path / "results.json").read_text())
    assert [task["task"] for task in document["tasks"]] == ["one?shots=4", "two?shots=4"]
    assert [task["problems"] for task in document["tasks"]] == [2, 2]
    table = (tmp_path / "table.md").read_text()
    assert table.count("self_consistency at 16 less greedy | +50.0") == 3
    assert "| all tasks | best at 16 over greedy |" in table
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
