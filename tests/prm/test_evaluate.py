"""ProcessBench's protocol on solutions whose accuracies are counted by hand, and malformed files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from prm.evaluate import ProcessBenchCase, Scores, evaluate, fit_threshold, predict, read_cases, score_cases
from prm.records import BadRecord
from tests.seeds import shift

GOOD: dict[str, Any] = {
    "id": "gsm8k-0",
    "generator": "somebody",
    "problem": "What is 2 + 2 - 1?",
    "steps": ["2 + 2 = 4", "4 - 1 = 2", "\\boxed{2}"],
    "final_answer_correct": False,
    "label": 1,
}


def case(label: int, steps: int = 3) -> ProcessBenchCase:
    return ProcessBenchCase("x", "somebody", "?", ("step",) * steps, label == -1, label)


BY_HAND: list[tuple[int, Scores]] = [
    # With an error: right only if the first score below 0.5 is at the first wrong step.
    (1, (0.9, 0.2, 0.9)),  # found
    (1, (0.4, 0.2, 0.1)),  # too early
    (1, (0.9, 0.8, 0.1)),  # too late
    (0, (0.1, 0.9, 0.9)),  # found
    (2, (0.9, 0.9, 0.9)),  # missed
    # Without an error: right only if no score is below 0.5.
    (-1, (0.9, 0.5, 0.6)),  # right: 0.5 is not below 0.5
    (-1, (0.9, 0.9, 0.4)),  # a false alarm
    (-1, (0.7, 0.7, 0.7)),  # right
]
CASES = [case(label) for label, _ in BY_HAND]
SCORES = [scores for _, scores in BY_HAND]


def test_the_accuracies_and_f1_are_those_counted_by_hand() -> None:
    result = evaluate(CASES, SCORES, 0.5)
    assert (result.cases, result.erroneous) == (8, 5)
    assert result.error_accuracy == pytest.approx(2 / 5)
    assert result.correct_accuracy == pytest.approx(2 / 3)
    assert result.f1 == pytest.approx(2 * (2 / 5) * (2 / 3) / (2 / 5 + 2 / 3)) == pytest.approx(0.5)


def test_without_one_of_the_kinds_there_is_no_f1() -> None:
    result = evaluate(CASES[:5], SCORES[:5], 0.5)
    assert (result.correct_accuracy, result.f1) == (None, None)
    assert evaluate(CASES[:5] + CASES[6:7], SCORES[:5] + SCORES[6:7], 0.5).f1 == 0.0
    with pytest.raises(ValueError, match="both kinds"):
        fit_threshold(CASES[:5], SCORES[:5])


def test_a_blank_step_is_never_the_predicted_error() -> None:
    assert predict((None, 0.9, 0.1), 0.5) == 2
    assert predict((None, 0.9), 0.95) == 1


def test_a_fitted_threshold_equals_the_best_of_all_distinct_ones() -> None:
    noise = random.Random(shift(5))
    for _ in range(100):
        cases = [case(noise.choice((-1, 0, 1, 2))) for _ in range(12)] + [case(-1), case(1)]
        # Few distinct scores, so that many are equal, and an occasional blank step.
        scores: list[Scores] = [
            tuple(None if noise.random() < 0.1 else noise.randrange(6) / 6 for _ in range(3)) for _ in cases
        ]
        # A threshold half-way between two possible scores stands for all with the same predictions.
        best = max(evaluate(cases, scores, (place + 0.5) / 6).f1 or 0.0 for place in range(-1, 7))
        assert evaluate(cases, scores, fit_threshold(cases, scores)).f1 == pytest.approx(best)


async def test_every_case_is_scored_once_in_order_and_blank_steps_are_not_sent() -> None:
    cases = [ProcessBenchCase(str(i), "g", "?", ("a" * (i + 1), " ", "b"), True, -1) for i in range(9)]
    sent: list[str] = []

    async def score(one: ProcessBenchCase, steps: tuple[str, ...]) -> tuple[float, ...]:
        sent.append(one.id)
        return tuple(len(step) / 10 for step in steps)

    done: list[None] = []
    scores = await score_cases(cases, score, concurrency=4, on_progress=lambda: done.append(None))
    assert scores == [((i + 1) / 10, None, 0.1) for i in range(9)]
    assert sorted(sent) == [str(i) for i in range(9)]
    assert len(done) == 9


async def test_an_error_while_scoring_is_raised_unchanged() -> None:
    async def score(one: ProcessBenchCase, steps: tuple[str, ...]) -> tuple[float, ...]:
        raise LookupError("nobody is there")

    with pytest.raises(LookupError, match="nobody is there"):
        await score_cases(CASES, score)


@pytest.mark.parametrize("array", [False, True])
def test_both_file_formats_are_read(tmp_path: Path, array: bool) -> None:
    path, records = tmp_path / "cases", [GOOD, GOOD | {"id": "gsm8k-1", "label": -1, "final_answer_correct": True}]
    path.write_text(json.dumps(records, indent=2) if array else "\n\n".join(map(json.dumps, records)) + "\n")
    first, second = read_cases(path)
    assert first == ProcessBenchCase("gsm8k-0", "somebody", GOOD["problem"], tuple(GOOD["steps"]), False, 1)
    assert (second.id, second.label) == ("gsm8k-1", -1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": 3}, "line 2: 'label' is 3; it must be a whole number from -1 to 2"),
        ({"label": True}, "line 2: 'label' is true; it must be a whole number from -1 to 2"),
        ({"label": None}, "line 2: 'label' is missing; there are id, generator, problem, steps, final_answer_correct"),
        ({"steps": []}, "line 2: 'steps' is []; it must be a list of at least one text"),
        ({"steps": ["a", 1]}, "line 2: 'steps' is .*; it must be a list of at least one text"),
        ({"steps": [" ", ""]}, "line 2: 'steps' is .*; it must be a list of texts that are not all blank"),
        ({"problem": " "}, "line 2: 'problem' is \" \"; it must be a text that is not blank"),
        ({"final_answer_correct": 1}, "line 2: 'final_answer_correct' is 1; it must be true or false"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number_its_field_and_the_valid_value(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "cases.jsonl"
    bad = {name: value for name, value in (GOOD | change).items() if value is not None}
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(bad)}\n")
    with pytest.raises(BadRecord, match=message.replace("[]", r"\[\]")):
        read_cases(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 1}\n{"id"', "line 1: 'steps' is missing; there are id"),
        (json.dumps(GOOD) + '\n{"id"', "line 2: not JSON"),
        ("3\n", "line 1: a JSON object is expected, this is int"),
        ("[3]", "item 1: a JSON object is expected, this is int"),
        ("[{", "not a JSON array"),
    ],
)
def test_invalid_json_is_refused_with_its_position(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(text)
    with pytest.raises(BadRecord, match=message):
        read_cases(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRecord, match="nowhere"):
        read_cases(tmp_path / "nowhere")
