"""Problems and answers of a contest: what their files may look like, and what is refused with its place."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from reasoner.answers.votes import Vote
from reasoner.contest.answers import Answer, choose_answer, read_whole_number, write_answers
from reasoner.contest.problems import ContestProblem, digest_problems, read_problems
from reasoner.evaluation.suites.suite import SuiteError
from reasoner.jobs.job import JobResult


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("aimo.csv", 'id,problem,answer\na1,"What is $1+1$,\nexactly?",2\nb2,And 2+2?,4\n'),
        ("aimo3.csv", 'id,problem,answer\r\na1,"What is $1+1$,\nexactly?",2\r\nb2,And 2+2?,4\r\n'),
        (
            "p.jsonl",
            '{"id": "a1", "problem": "What is $1+1$,\\nexactly?", "answer": 2}\n\n'
            '{"id": "b2", "problem": "And 2+2?", "answer": "Two and two.\\n#### 4"}\n',
        ),
    ],
)
def test_csv_and_json_lines_have_the_same_problems(name: str, text: str, tmp_path: Path) -> None:
    assert read_problems(write(tmp_path / name, text)) == [
        ContestProblem("a1", "What is $1+1$,\nexactly?", "2"),
        ContestProblem("b2", "And 2+2?", "4"),
    ]


def test_answers_may_be_missing_and_lines_without_an_id_are_numbered(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", '{"question": "1+1?"}\n{"question": "2+2?", "answer": ""}\n')
    assert read_problems(path) == [ContestProblem("1", "1+1?"), ContestProblem("2", "2+2?")]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("p.csv", "id,problem\na,x\na,y\n", "line 3, field 'id': 'a' is also the id at"),
        ("p.csv", "id,problem\na,x\n,y\n", "line 3, field 'id'"),
        ("p.csv", "id,problem\na,x\nb,  \n", "line 3, field 'problem'"),
        ("p.csv", "id,problem\na\n", "line 2: 1 cells, but the header has 2"),
        ("p.csv", "id,problem\n", "no problems"),
        ("p.csv", "id,text\na,x\n", "line 2: field 'problem' is missing"),
        ("p.jsonl", '{"id": 1, "problem": "x"}\n{"id": 2}\n', "line 2: field 'problem' is missing"),
        ("p.jsonl", '{"id": [1], "problem": "x"}\n', "line 1, field 'id'"),
        ("p.jsonl", '{"problem": "x"\n', "line 1: not JSON"),
        ("p.jsonl", "", "no problems"),
    ],
)
def test_a_bad_file_is_refused_with_its_line_and_field(name: str, text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="p\\.") as refused:
        read_problems(write(tmp_path / name, text))
    assert told in str(refused.value)


def test_a_digest_depends_on_ids_and_texts_and_not_on_the_answers() -> None:
    digest = digest_problems([ContestProblem("a", "x", "1")])
    assert digest == digest_problems([ContestProblem("a", "x")])
    assert digest != digest_problems([ContestProblem("b", "x")])
    assert digest != digest_problems([ContestProblem("a", "y")])


@pytest.mark.parametrize(
    ("text", "number"),
    [("12", 12), (" 1,200 ", 1200), ("12.0", 12), ("+7", 7), ("12.5", None), ("-3", None), ("x", None), ("", None)],
)
def test_whole_numbers_are_read_as_people_write_them(text: str, number: int | None) -> None:
    assert read_whole_number(text) == number


def build_result(answer: str | None, *votes: tuple[str, float]) -> JobResult:
    counted = [Vote(answer=stated, count=1, weight=weight) for stated, weight in votes]
    return JobResult(answer=answer, text="", confidence=0.5, votes=counted, finish_reason="answer", node="0")


def test_the_remainder_with_the_most_votes_is_handed_in() -> None:
    votes = [("x/2", 4.0), ("52.0", 3.0), ("7", 2.0), ("1,007", 1.5), ("-4", 1.0)]
    assert choose_answer(build_result("x/2", *votes), 1000) == "7"
    assert choose_answer(build_result("x/2", *votes), 100_000) == "52"
    assert choose_answer(build_result("x/2", *votes), None) == "x/2"
    assert choose_answer(build_result("x/2", ("x/2", 1.0)), 1000) is None
    assert choose_answer(build_result("1,000"), 1000) == "0"
    assert choose_answer(build_result(None), 1000) is None
    assert choose_answer(None, 1000) is None


@pytest.mark.parametrize(("modulo", "blank"), [(None, ""), (999, "0")])
def test_the_files_of_answers_have_a_row_for_each_problem(modulo: int | None, blank: str, tmp_path: Path) -> None:
    told = [Answer("a,1", '{"x": 1}', 0.5, is_final=True), Answer("b", None, None, is_final=False)]
    write_answers(tmp_path, told, modulo)
    with (tmp_path / "answers.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["id", "answer"], ["a,1", '{"x": 1}'], ["b", blank]]
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [line["answer"] for line in lines] == ['{"x": 1}', None]
    assert {path.name for path in tmp_path.iterdir()} == {"answers.csv", "answers.jsonl"}
