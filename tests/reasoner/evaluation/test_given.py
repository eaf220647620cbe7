"""Candidates that were drawn elsewhere: files, rankings that are resumed, and the accuracy of each rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reasoner.answers.equivalence import Equivalence
from reasoner.answers.spec import AnswerSpec, Compare
from reasoner.answers.votes import group_equivalent
from reasoner.evaluation.labelled_candidates import (
    RANKINGS_FILE,
    RankedQuestion,
    RankingFile,
    measure_rules,
    rank_questions,
)
from reasoner.evaluation.logs.log_format import LabelledCandidates
from reasoner.evaluation.logs.registry import read_questions
from reasoner.evaluation.runs import EvaluationMismatch
from reasoner.evaluation.statistics import wilson_interval
from reasoner.evaluation.suites.suite import SuiteError
from reasoner.jobs.job import RankedCandidate
from reasoner.tree import Node

CANDIDATES = ["\\boxed{1}", "\\boxed{2}"]


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records) + "\n")
    return path


def ranked(question: str, *answers: tuple[str | None, float | None]) -> RankedQuestion:
    items = [
        RankedCandidate(index=index, node=str(index), answer=answer, answer_level="strict", score=score)
        for index, (answer, score) in enumerate(answers)
    ]
    items.sort(key=lambda item: -(item.score or 0.0))
    return RankedQuestion(question, items, items[0].answer)


# Files.


def test_questions_are_read_in_the_shapes_of_gsm8k_and_math_with_gold_answers_or_without(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.jsonl",
        {"question": "a", "candidates": CANDIDATES, "answer": "1 + 1 = 2\n#### 1,002"},
        "",
        {"problem": " b ", "candidates": [[{"role": "assistant", "content": "x"}]], "gold": 7},
        {"question": "c", "candidates": CANDIDATES},
    )
    questions = read_questions(path)
    assert [(question.id, question.question, question.gold) for question in questions] == [
        ("c-1", "a", "1002"),
        ("c-3", "b", "7"),
        ("c-4", "c", None),
    ]
    assert len(read_questions(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "line 1: not JSON"),
        ([1], "list instead of a JSON object"),
        ({"candidates": CANDIDATES}, "needs a text 'question'"),
        ({"question": "a"}, "needs 'candidates'"),
        ({"question": "a", "candidates": []}, "'candidates'.*at least 1 item"),
        ({"question": "a", "candidates": [3]}, "'candidates.0"),
        ({"question": "a", "candidates": CANDIDATES, "answer": [1]}, "field 'answer'"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number_and_field(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(SuiteError, match=message):
        read_questions(write(tmp_path / "c.jsonl", record))
    with pytest.raises(SuiteError, match="holds no question"):
        read_questions(write(tmp_path / "c.jsonl", ""))
    with pytest.raises(SuiteError, match="No such file"):
        read_questions(tmp_path / "absent.jsonl")


# Resuming.


async def test_a_run_that_was_killed_ranks_only_what_is_missing_under_the_same_id(tmp_path: Path) -> None:
    questions = [LabelledCandidates(str(number), "?", CANDIDATES, None) for number in range(20)]
    asked: list[str] = []

    async def rank(question: LabelledCandidates) -> RankedQuestion:
        asked.append(question.id)
        if len(asked) == 8:
            raise ConnectionError("gone")
        return ranked(question.id, ("1", 0.5))

    with RankingFile({"a": 1}, tmp_path) as file:
        run = file.run
        with pytest.raises(ConnectionError):
            await rank_questions(questions, rank, file, 1, lambda _: None)
    with (tmp_path / RANKINGS_FILE).open("a") as half:
        half.write('{"question": "half a li')  # as after kill -9
    before = asked[:7]
    asked = [*"x" * 20]  # no more failures
    with RankingFile({"a": 1}, tmp_path) as file:
        assert file.run == run
        await rank_questions(questions, rank, file, 3, lambda _: None)
    assert sorted(before + [name for name in asked if name != "x"]) == sorted(question.id for question in questions)
    with pytest.raises(EvaluationMismatch, match="a is 1 there and 2 here"), RankingFile({"a": 2}, tmp_path):
        pass


# Rules.


async def test_each_rule_is_measured_with_wilsons_interval() -> None:
    gold = {"a": "2", "b": "2", "c": "1/2", "d": "9"}
    questions = [LabelledCandidates(name, "?", CANDIDATES, answer) for name, answer in gold.items()]
    rankings = [
        ranked("a", ("1", 0.1), ("2.0", 0.2), ("2", 0.3), ("3", 0.4)),  # majority and weighted, by different notations
        ranked("b", ("2", 0.9), ("1", 0.2), ("1", 0.2), (None, 0.1)),  # first, weighted, best
        ranked("c", ("0.5", 0.2), ("\\frac{1}{2}", 0.3), ("3", 0.4)),  # all but the best
        ranked("d", ("1", 0.2), ("2", 0.2)),
    ]
    rows = {row.rule: row for row in await measure_rules(questions, rankings, AnswerSpec())}
    assert {rule: row.right for rule, row in rows.items()} == {
        "first": 2,
        "majority": 2,
        "weighted": 3,
        "best": 1,
        "ranked": 1,
        "oracle": 3,
    }
    assert (rows["first"].low, rows["first"].high) == wilson_interval(0.5, 4)


async def test_without_scores_there_is_no_weighted_vote_and_failures_are_left_out() -> None:
    questions = [LabelledCandidates(name, "?", CANDIDATES, "1") for name in "ab"]
    rankings = [ranked("a", ("1", None), ("2", None)), RankedQuestion("b", [], failed="too long")]
    rows = {row.rule: row.accuracy for row in await measure_rules(questions, rankings, AnswerSpec())}
    assert rows == {"first": 1.0, "majority": 1.0, "ranked": 1.0, "oracle": 1.0}


@pytest.mark.parametrize(
    ("gold", "answer", "compare", "right"),
    [
        ("0.5", "50%", "math", 1),
        ("3 m", "3 cm", "math", 0),
        ("3 m", "300 cm", "math", 1),
        ("2147483648", "2^{31}", "math", 1),
        ("x<3", "2x<6", "math", 1),
        ("Paris", "paris", "math", 1),
        ("Paris", "paris", "text", 0),
        ("(B)", "B", "choice", 1),
        ('{"a": 1.0}', '{"a":1}', "json", 1),
    ],
)
async def test_an_answer_is_right_if_it_would_share_the_vote_of_the_right_one(
    gold: str, answer: str, compare: Compare, right: int
) -> None:
    spec = AnswerSpec(compare=compare)
    rows = await measure_rules([LabelledCandidates("a", "?", CANDIDATES, gold)], [ranked("a", (answer, None))], spec)
    assert {row.right for row in rows} == {right}
    nodes = [Node((index,), None, (), answer=text) for index, text in enumerate((gold, answer))]
    async with Equivalence() as equivalence:
        assert (len(await group_equivalent(nodes, spec, equivalence)) == 1) == bool(right)
