"""Files of problems as they are published: AIME, MATH-500, GPQA; ids, CSV and Parquet."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from reasoner.answers.equivalence import Equivalence
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import open_suite
from reasoner.evaluation.suites.suite import Suite, SuiteError
from tests.seeds import shift

MATH_500 = {
    "problem": "Convert $(0,3)$ to polar coordinates.",
    "solution": "We have $r=3$. So $\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}.$",
    "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
    "subject": "Precalculus",
    "level": 2,
    "unique_id": "test/precalculus/807.json",
}
AIME_2024 = {"ID": "2024-I-1", "Problem": "How many minutes?", "Solution": "It is 204.", "Answer": 204}
GPQA = {
    "Pre-Revision Question": "?",
    "Question": "Which of these is largest?",
    "Correct Answer": "a galaxy\n",
    "Incorrect Answer 1": "a star",
    "Incorrect Answer 2": "a planet, with\ntwo moons",
    "Incorrect Answer 3": 'a "moon"',
    "Explanation": "Galaxies hold stars.",
    "Subdomain": "Astrophysics",
    "High-level domain": "Physics",
    "Record ID": "rec1",
}


async def is_right(suite: Suite, problem: Problem, answer: str) -> bool:
    async with Equivalence() as equal:
        return await suite.check(problem, answer, equal)


def write_jsonl(folder: Path, *records: dict[str, Any], name: str = "x.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder / name)


def write_csv(folder: Path, records: Sequence[dict[str, Any]]) -> str:
    with (folder / "gpqa_tiny.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
    return str(folder / "gpqa_tiny.csv")


async def test_math_500_keeps_its_ids_and_compares_mathematics(tmp_path: Path) -> None:
    suite = open_suite(write_jsonl(tmp_path, MATH_500), limit=9)
    (problem,) = suite.problems
    assert (problem.id, problem.level, problem.data) == ("test/precalculus/807.json", "2", {"subject": "Precalculus"})
    assert await is_right(suite, problem, "(3, \\pi/2)")
    assert not await is_right(suite, problem, "(3, \\pi)")


@pytest.mark.parametrize(
    ("prefix", "record", "name", "answer"),
    [
        ("", AIME_2024, "2024-I-1", "204"),
        ("aime:", AIME_2024 | {"Answer": "073"}, "2024-I-1", "73"),
        ("aime:", {"id": 60, "problem": "?", "solution": "s", "answer": "025", "url": "u", "year": "2024"}, "60", "25"),
        ("aime:", {"problem": "?", "answer": "70", "id": "0"}, "0", "70"),
        ("aime:", {"problem_idx": 1, "problem": "?", "answer": 70, "problem_type": ["Algebra"]}, "1", "70"),
        ("aime:", {"question": "?", "answer": "336^\\circ"}, "x-1", "336"),
    ],
)
async def test_every_published_form_of_aime_is_read(
    prefix: str, record: dict[str, Any], name: str, answer: str, tmp_path: Path
) -> None:
    suite = open_suite(prefix + write_jsonl(tmp_path, record), limit=9)
    (problem,) = suite.problems
    assert (problem.id, problem.suite, problem.answer) == (name, "aime", answer)
    assert await is_right(suite, problem, f"0{answer}")
    assert not await is_right(suite, problem, f"{answer}0")


@pytest.mark.parametrize("answer", [1000, -1, 2.5, True, "", "12.5", "\u0664", None, [1]])
def test_an_answer_that_no_aime_has_is_refused_with_line_and_field(answer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, AIME_2024, AIME_2024 | {"ID": "2024-I-2", "Answer": answer})
    with pytest.raises(SuiteError, match=r"x\.jsonl, line 2, field 'Answer': .* must be a whole number from 0 to 999"):
        open_suite(path, limit=9)


async def test_gpqa_is_answered_by_the_letter_of_the_right_choice(tmp_path: Path) -> None:
    suite = open_suite(write_csv(tmp_path, [GPQA, GPQA | {"Record ID": "rec2"}]), limit=9)
    first, second = suite.problems
    assert (suite.name, first.id, second.id) == ("gpqa_tiny", "rec1", "rec2")
    assert first.text.startswith("Which of these is largest?\n\n(A) ")
    assert f"({first.answer}) a galaxy" in first.text
    assert first.data == {"subject": "Physics"}
    assert suite.answer_spec.compare == "choice"
    wrong = next(letter for letter in "ABCD" if letter != first.answer)
    assert await is_right(suite, first, first.answer)
    assert not await is_right(suite, first, wrong)


def test_the_seed_shuffles_the_choices_evenly(tmp_path: Path) -> None:
    """Each letter has 100 ± 4.4 standard errors of 400 with p > 0.9999."""
    path = write_csv(tmp_path, [GPQA | {"Record ID": f"rec{number}"} for number in range(400)])
    problems = open_suite(path, limit=400, seed=shift(0)).problems
    counts = Counter(problem.answer for problem in problems)
    assert all(abs(counts[letter] - 100) < 4.4 * (400 * 0.25 * 0.75) ** 0.5 for letter in "ABCD")
    assert open_suite(path, limit=400, seed=shift(0)).problems == problems
    assert open_suite(path, limit=400, seed=shift(1)).problems != problems


def test_parquet_and_gzip_hold_the_same_problems_as_json_lines(tmp_path: Path) -> None:
    records = [AIME_2024, AIME_2024 | {"ID": "2024-I-2", "Answer": 7}]
    plain = open_suite(write_jsonl(tmp_path, *records), limit=9)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "x.parquet")
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress((tmp_path / "x.jsonl").read_bytes()))
    for name in ("x.parquet", "x.jsonl.gz"):
        other = open_suite(str(tmp_path / name), limit=9)
        assert (other.name, other.problems) == (plain.name, plain.problems)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records * 2), tmp_path / "twice.parquet")
    with pytest.raises(SuiteError, match=r"twice\.parquet, row 3, field 'ID': '2024-I-1' is the id of another problem"):
        open_suite(str(tmp_path / "twice.parquet"), limit=9)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (GPQA, GPQA, "line 3, field 'Record ID': 'rec1' is the id of another problem, too: FILE, line 2"),
        (GPQA, GPQA | {"Record ID": " "}, "line 3, field 'Record ID': ' ' must be the id"),
        (GPQA, GPQA | {"Record ID": "rec2", "Incorrect Answer 2": ""}, "line 3, field 'Incorrect Answer 2': '' must"),
    ],
)
def test_a_faulty_row_of_csv_is_refused_with_line_and_field(
    first: dict[str, Any], second: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """The first row has a line break in a cell, so that the second begins two lines below it."""
    path = write_csv(tmp_path, [first, second])
    with pytest.raises(SuiteError) as caught:
        open_suite(path, limit=9)
    assert said.replace("line 3", "line 5").replace("FILE", path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"unique_id": "test/precalculus/807.json"},
            "line 2, field 'unique_id': 'test/precalculus/807.json' is the id",
        ),
        ({"unique_id": 1.5}, "line 2, field 'unique_id': 1.5 must be the id"),
        ({"unique_id": True}, "line 2, field 'unique_id': True must be the id"),
        ({"unique_id": "b", "problem": ""}, "line 2, field 'problem': '' must be a text"),
    ],
)
def test_a_faulty_id_is_refused_with_line_and_field(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(SuiteError) as caught:
        open_suite(write_jsonl(tmp_path, MATH_500, MATH_500 | change), limit=9)
    assert said in str(caught.value)


def test_a_missing_id_is_refused(tmp_path: Path) -> None:
    rest = {name: value for name, value in MATH_500.items() if name != "unique_id"}
    with pytest.raises(SuiteError, match="line 2: field 'unique_id' is missing: the id of the problem"):
        open_suite(write_jsonl(tmp_path, MATH_500, rest), limit=9)
    rest = {name: value for name, value in GPQA.items() if name != "Record ID"}
    with pytest.raises(SuiteError, match="line 2: field 'Record ID' is missing"):
        open_suite(write_csv(tmp_path, [rest]), limit=9)


def test_a_broken_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('Record ID,Question\nrec1,"open\n')
    (tmp_path / "b.csv").write_text("Record ID,Question\nrec1\n")
    (tmp_path / "c.parquet").write_bytes(b"none")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"problem": "?"}')[:-9])
    (tmp_path / "e.csv").write_bytes(b"Record ID\n\xff\n")
    for name, said in (
        ("a.csv", "a.csv, line 2: not CSV"),
        ("b.csv", "b.csv, line 2: 1 cells, but the header has 2"),
        ("c.parquet", "c.parquet: it is no Parquet file"),
        ("d.jsonl.gz", "d.jsonl.gz: the compressed file is not complete"),
        ("e.csv", "e.csv: not UTF-8"),
    ):
        with pytest.raises(SuiteError) as caught:
            open_suite(str(tmp_path / name), limit=9)
        assert said in str(caught.value)
