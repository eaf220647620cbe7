"""JSON Lines files as other programs write them are read alike by everything that reads any."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.cli.batch import _read_jobs
from engine.quantization.calibration import _read_texts
from engine.text.json_lines import NotUtf8, read_json_lines
from prm.records import BadRecord, read_records
from reasoner.evaluation.logs.registry import read_questions
from reasoner.evaluation.suites.files.registry import open_file
from reasoner.evaluation.suites.suite import SuiteError

WORDS = "one line\u2028the same\u2029and\x85still \x0b it"
RECORD = {"problem": WORDS, "question": WORDS, "answer": "so #### 7", "candidates": ["7"], "text": WORDS}
LINE = json.dumps(RECORD, ensure_ascii=False)
FORMS = {
    "plain": f"{LINE}\n{LINE}\n",
    "no end": f"{LINE}\n{LINE}",
    "carriage returns": f"{LINE}\r\n{LINE}\r\n",
    "old": f"{LINE}\r{LINE}\r",
    "mark": f"\ufeff{LINE}\n{LINE}\n",
    "mark and carriage returns": f"\ufeff{LINE}\r\n\r\n{LINE}",
    "joined files": f"\ufeff{LINE}\n\ufeff{LINE}\n",
    "blank": f"\n  \n{LINE}\n\t\n\n{LINE}\n\n",
}
READERS: dict[str, Callable[[Path], list[str]]] = {
    "lines": lambda path: [json.loads(line)["text"] for _, line in read_json_lines(path)],
    "jobs": lambda path: [job["problem"] for job in _read_jobs(path)],
    "candidates": lambda path: [question.question for question in read_questions(path)],
    "suite": lambda path: [problem.text for problem in open_file(path, None).problems],
    "records": lambda path: [record.text("text") for record in read_records(path)],
    "calibration": _read_texts,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reader", READERS)
def test_a_file_is_read_in_every_form(reader: str, form: str, tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(FORMS[form].encode())
    assert READERS[reader](path) == [WORDS, WORDS]


@pytest.mark.parametrize(
    ("reader", "error"), [("suite", SuiteError), ("candidates", SuiteError), ("records", BadRecord)]
)
def test_a_file_in_another_encoding_is_named(reader: str, error: type[Exception], tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(LINE.encode("utf-16"))
    with pytest.raises(error, match="not UTF-8"):
        READERS[reader](path)


@pytest.mark.parametrize("form", ["\ufeff[{}, {}]", "\r\n [{},\r\n {}]\r\n"])
def test_an_array_of_records_is_read_with_a_mark_and_carriage_returns(form: str, tmp_path: Path) -> None:
    record: Any = json.dumps(RECORD)
    path = tmp_path / "file.json"
    path.write_bytes(form.replace("{}", record).encode())
    assert [one.text("text") for one in read_records(path)] == [WORDS, WORDS]


def test_lines_have_the_numbers_that_an_editor_shows(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(f"\ufeff\r\n{LINE}\r\n\r\n{LINE}".encode())
    assert [number for number, _ in read_json_lines(path)] == [2, 4]


def test_a_line_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": "caf\xe9"}\n')
    with pytest.raises(NotUtf8, match=r"^line 3: not UTF-8$"):
        list(read_json_lines(path))
    path.write_bytes('{"text": "a"}\n'.encode("utf-16"))
    with pytest.raises(NotUtf8, match=r"^line 1: not UTF-8$"):
        list(read_json_lines(path))
