"""The form of LiveCodeBench (code generation): contest problems with public and private tests.

Source: Jain et al. 2024, "LiveCodeBench: Holistic and Contamination Free Evaluation of Large Language Models for Code".
The fields are ``question_id``, ``question_title``, ``question_content``, ``starter_code``, ``difficulty``,
``public_test_cases``, ``private_test_cases`` and ``metadata``; tests and metadata are JSON in a text. A test has
``input``, ``output`` and ``testtype``: ``stdin``, or ``functional`` with one JSON value a line as arguments of the
function ``func_name`` of the metadata. Private tests are JSON, or that text pickled, compressed and in base64. Nothing
is unpickled: the text is read from a pickle that holds one text and nothing else, and any other pickle is refused.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from reasoner.evaluation.suites.files.code_tests import PYTHON_ANSWER, CodeRule
from reasoner.evaluation.suites.files.contest_program import FUNCTIONAL, STDIN, build_task
from reasoner.evaluation.suites.files.file_format import FileFormat, make_problem
from reasoner.evaluation.suites.files.records import Record
from reasoner.evaluation.suites.problem import Problem

MAX_TESTS_BYTES = 1 << 28
"""Largest size of a problem's private tests when unpacked."""
_TEST_FIELDS = ("input", "output", "testtype")
_TEXTS = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
_HARMLESS = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"})
_ASKS_FUNCTION = "Write a Python solution that completes this code.\n\n```python\n{starter}\n```"
_ASKS_PROGRAM = "Write a Python program that reads the input from stdin and prints the output."


def _parse(record: Record, name: str, seed: int) -> Problem:  # noqa: ARG001
    question = record.read_text("question_content", "the problem's text").strip()
    starter = record.fields.get("starter_code") or ""
    function = _read_json(record, "metadata", "{}", dict).get("func_name")
    tests = _read_tests(record)
    kinds = {test["testtype"] for test in tests}
    if kinds == {FUNCTIONAL} and not (isinstance(function, str) and function.isidentifier()):
        raise record.refuse("metadata", f"func_name {function!r} must be the name of the function that tests call")
    if kinds not in ({FUNCTIONAL}, {STDIN}):
        raise record.refuse("private_test_cases", f"testtype must be {STDIN} or {FUNCTIONAL} in all tests, not {kinds}")
    ask = _ASKS_FUNCTION.format(starter=starter.rstrip()) if kinds == {FUNCTIONAL} else _ASKS_PROGRAM
    return make_problem(
        record,
        name,
        "livecodebench",
        text=f"{question}\n\n{ask}",
        answer="",
        field="question_content",
        level=str(record.fields.get("difficulty", "")),
        data={
            "function": function if kinds == {FUNCTIONAL} else None,
            "inputs": [test["input"] for test in tests],
            "outputs": [test["output"] for test in tests],
        },
    )


def _read_tests(record: Record) -> Sequence[Mapping[str, str]]:
    """Return the public and private tests, each with texts as input, output and type."""
    public = _read_json(record, "public_test_cases", "[]", list)
    private = record.read_text("private_test_cases", "the hidden tests")
    try:
        packed = private if private.lstrip().startswith("[") else unpack_text(private)
        hidden = json.loads(packed)
    except ValueError as error:
        raise record.refuse(
            "private_test_cases", f"neither JSON nor JSON pickled, compressed and in base64: {error}"
        ) from None
    tests = [*public, *(hidden if isinstance(hidden, list) else [hidden])]
    for number, test in enumerate(tests, 1):
        if not isinstance(test, dict) or not all(isinstance(test.get(key), str) for key in _TEST_FIELDS):
            raise record.refuse("private_test_cases", f"test {number} needs the texts {', '.join(_TEST_FIELDS)}")
    if not tests:
        raise record.refuse("private_test_cases", "there is no test, so that any answer would pass")
    return tests


def _read_json(record: Record, field: str, default: str, kind: type) -> Any:
    text = record.fields.get(field) or default
    try:
        value = json.loads(text)
    except (TypeError, ValueError) as error:
        raise record.refuse(field, f"not JSON in a text: {error}") from None
    if not isinstance(value, kind):
        raise record.refuse(field, f"{type(value).__name__} instead of a JSON {kind.__name__}")
    return value


def unpack_text(packed: str) -> str:
    """Return the text of a pickle in zlib in base64, read from its one text without running any of its operations.

    Raises ``ValueError`` for other data, and for a pickle that holds anything else than one text.
    """
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(packed, validate=True), MAX_TESTS_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from None
    if not unpacker.eof:
        raise ValueError(f"incomplete, or more than {MAX_TESTS_BYTES >> 20} MiB when unpacked")
    texts: list[str] = []
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in _TEXTS:
            texts.append(str(argument))
        elif operation.name not in _HARMLESS:
            raise ValueError(f"the pickle has the operation {operation.name}; only one that holds one text is read")
    if len(texts) != 1:
        raise ValueError(f"the pickle has {len(texts)} texts; only one that holds one text is read")
    return texts[0]


FORMAT = FileFormat(
    name="livecodebench",
    title="LiveCodeBench",
    marks=("question_content", "public_test_cases", "private_test_cases"),
    fields="'question_id', 'question_content', 'public_test_cases', 'private_test_cases' and 'metadata'",
    parse=_parse,
    id_fields=("question_id",),
    has_ids=True,
    rule=CodeRule(build_task),
    answer=PYTHON_ANSWER,
    runs_code=True,
)
