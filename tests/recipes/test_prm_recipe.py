"""Cases in ProcessBench's format from the suites' exact labels."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from prm.evaluate import read_cases
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import load_problems
from recipes.prm.cases import cases, write
from recipes.suites.solutions import label_steps

PROBLEM = Problem("p", "countdown", "n3", "?", "(4 * 3) * 2", {"numbers": [2, 3, 4], "target": 24})
RIGHT = "4 * 3 = 12, left 2 12\n\n12 * 2 = 24, left 24\n\n\\boxed{(4 * 3) * 2}"
LATE = "4 * 3 = 12, left 2 12\n\n12 + 2 = 14, left 14\n\n\\boxed{(4 * 3) + 2}"
EARLY = "4 + 3 = 7, left 2 7\n\n7 * 2 = 14, left 14\n\n\\boxed{(4 + 3) * 2}"


def test_the_first_solution_of_each_kind_is_a_case_with_its_first_wrong_step() -> None:
    found = list(cases(PROBLEM, ["", LATE, EARLY, RIGHT, RIGHT], "somebody"))
    assert [(case["id"], case["label"], case["final_answer_correct"]) for case in found] == [
        ("p-1", 1, False),
        ("p-3", -1, True),
    ]
    assert found[0]["steps"] == ["4 * 3 = 12, left 2 12", "12 + 2 = 14, left 14", "\\boxed{(4 * 3) + 2}"]
    assert [case["label"] for case in cases(PROBLEM, [EARLY], "somebody")] == [0]


def test_files_match_the_evaluations_format_share_no_problem_and_have_exact_labels(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    policy = Path(__file__).parents[2] / "reasoner" / "bundled" / "policy"
    written = write("countdown", 3, policy, tmp_path, seed=1)
    problems = {problem.text: problem for problem in load_problems("countdown", limit=6)}
    measured, fitted = (read_cases(tmp_path / name) for name in ("countdown.jsonl", "countdown-fit.jsonl"))
    assert list(written.values()) == [len(measured), len(fitted)]
    assert len(measured) >= 3
    assert not {case.problem for case in measured} & {case.problem for case in fitted}
    for case in (*measured, *fitted):
        labels = label_steps(problems[case.problem], list(case.steps))
        assert case.label == (labels.index(False) if False in labels else -1)
    for line in (tmp_path / "countdown.jsonl").read_text().splitlines():
        assert list(json.loads(line)) == ["id", "generator", "problem", "steps", "final_answer_correct", "label"]
