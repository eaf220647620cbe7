"""Suites whose answers are programs: HumanEval and LiveCodeBench as they are published, in the sandbox."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.types import InvalidRequest
from reasoner.answers.equivalence import Equivalence
from reasoner.evaluation.measure import EvaluationContext
from reasoner.evaluation.plan import EvaluationPlan
from reasoner.evaluation.suites.files import code_tests
from reasoner.evaluation.suites.files.livecodebench import unpack_text
from reasoner.evaluation.suites.registry import open_suite
from reasoner.evaluation.suites.suite import Suite, SuiteError
from reasoner.jobs.sampling_spec import Sampling
from reasoner.sandbox.runner import Limits, SandboxRefused, Verdict
from tests.scripted import ScriptedEngine

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "from typing import List\n\n\ndef half(n: int) -> int:\n    return n // 2\n\n\n"
    'def halves(numbers: List[int]) -> List[int]:\n    """ Halve each number.\n    >>> halves([4])\n    [2]\n    """\n',
    "entry_point": "halves",
    "canonical_solution": "    return [half(number) for number in numbers]\n",
    "test": "\n\nMETADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert candidate([4, 7]) == [half(4), 3]\n"
    "    assert candidate([]) == []\n",
}
STDIN_TESTS = [
    {"input": "3\n1 2 3\n", "output": "6\n", "testtype": "stdin"},
    {"input": "1\n5\n", "output": "5.0", "testtype": "stdin"},
]
LIVECODEBENCH = {
    "question_title": "Sum",
    "question_content": "Print the sum of the numbers.",
    "platform": "atcoder",
    "question_id": "abc301_a",
    "contest_id": "abc301",
    "contest_date": "2024-01-01T00:00:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps(STDIN_TESTS[:1]),
    "private_test_cases": json.dumps(STDIN_TESTS[1:]),
    "metadata": "{}",
}
FUNCTIONAL = LIVECODEBENCH | {
    "question_id": "3000",
    "starter_code": "class Solution:\n    def addAll(self, first: int, rest: List[int]) -> List[int]:\n        ",
    "public_test_cases": "[]",
    "private_test_cases": json.dumps(
        [{"input": "1\n[2, 3]", "output": "[3, 4]", "testtype": "functional"}],
    ),
    "metadata": json.dumps({"func_name": "addAll"}),
}


def pack(value: Any, protocol: int = 4) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


def open_records(folder: Path, *records: dict[str, Any]) -> Suite:
    path = folder / "tiny.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return open_suite(str(path), limit=9)


async def judge(suite: Suite, answers: Sequence[str]) -> list[bool]:
    return [await suite.check(suite.problems[0], answer, Equivalence()) for answer in answers]


async def test_humaneval_runs_its_test_on_the_answer_behind_the_head(tmp_path: Path) -> None:
    suite = open_records(tmp_path, HUMANEVAL)
    (problem,) = suite.problems
    assert problem.id == "HumanEval/0"
    assert "def halves" in problem.text
    assert "METADATA" not in problem.text
    spec = suite.answer_spec
    assert (spec.compare, spec.extract.model_dump() if not isinstance(spec.extract, str) else "") == (
        "code",
        {"code": "python"},
    )
    right = [problem.answer, "def halves(numbers: List[int]):\n    return [n // 2 for n in numbers]"]
    wrong = ["", "def halves(numbers):\n    return numbers", "def halves(:", "import os\nos._exit(0)"]
    assert await judge(suite, right) == [True, True]
    assert await judge(suite, wrong) == [False] * 4


async def test_programs_are_judged_by_what_they_print(tmp_path: Path) -> None:
    suite = open_records(tmp_path, LIVECODEBENCH)
    right = [
        "n = int(input())\nprint(sum(map(int, input().split())))",
        "import sys\nfrom fractions import Fraction\nprint(sum(map(Fraction, sys.stdin.read().split()[1:])))\nexit()",
        "print(sum(map(int, open(0).read().split()[1:])))",
        "if __name__ == '__main__':\n    sys.stdout.write(str(sum(map(int, sys.stdin.readlines()[1].split()))) + '  ')",
    ]
    wrong = ["print(6)", "print(input())", "raise ValueError", "print('six')", "("]
    assert await judge(suite, right) == [True] * 4
    assert await judge(suite, wrong) == [False] * 5


async def test_functions_are_judged_by_their_results(tmp_path: Path) -> None:
    suite = open_records(tmp_path, FUNCTIONAL)
    assert suite.problems[0].text.endswith("```python\n" + FUNCTIONAL["starter_code"].rstrip() + "\n```")
    head = FUNCTIONAL["starter_code"]
    assert await judge(
        suite, [f"{head}return [first + n for n in rest]", f"{head}return tuple(n + 1 for n in rest)"]
    ) == [
        True,
        True,
    ]
    assert await judge(suite, [f"{head}return rest", f"{head}return set(rest)", "def other(): pass"]) == [False] * 3


async def test_inputs_and_outputs_longer_than_the_sandboxs_pipe_are_compared(tmp_path: Path) -> None:
    text = "\n".join(map(str, range(300_000)))
    assert len(text) > 1 << 20
    long = [{"input": text, "output": text, "testtype": "stdin"}]
    suite = open_records(
        tmp_path, LIVECODEBENCH | {"public_test_cases": "[]", "private_test_cases": pack(json.dumps(long))}
    )
    answers = ["import sys\nprint(sys.stdin.read())", "import sys\nprint(sys.stdin.read()[:-1])"]
    assert await judge(suite, answers) == [True, False]


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("text", ["[]", "ü" * 300, "x" * 100_000], ids=["short", "middle", "long"])
def test_a_pickled_text_is_read_without_unpickling(text: str, protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(text, protocol)
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(pickle, "Unpickler", None)
    assert unpack_text(packed) == text


class Malicious:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('it ran')",))


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        (pack(Malicious()), "the pickle has the operation"),
        (pack(["[]", Malicious()]), "the pickle has the operation"),
        (pack([{"input": ""}]), "the pickle has the operation"),
        (pack(3), "the pickle has the operation"),
        (base64.b64encode(zlib.compress(b"\x80\x04.")).decode(), "the pickle has 0 texts"),
        (base64.b64encode(zlib.compress(b"\x80\x04\x8c\x01a\x8c\x01b.")).decode(), "the pickle has 2 texts"),
        (base64.b64encode(zlib.compress(b"\x80\x04\x8c\x09a.")).decode(), "expected 9 bytes"),
        (base64.b64encode(b"plain").decode(), "Error -3"),
        (base64.b64encode(zlib.compress(pickle.dumps("[]"))[:-5]).decode(), "incomplete"),
        ("{}", "base64"),
    ],
)
def test_anything_but_a_text_is_refused_and_nothing_of_it_runs(packed: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SuiteError) as caught:
        open_records(tmp_path, LIVECODEBENCH, LIVECODEBENCH | {"question_id": "b", "private_test_cases": packed})
    assert "line 2, field 'private_test_cases'" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("record", "change", "said"),
    [
        (LIVECODEBENCH, {}, "line 2, field 'question_id': 'abc301_a' is the id of another problem"),
        (LIVECODEBENCH, {"question_id": None}, "line 2, field 'question_id': None must be the id"),
        (LIVECODEBENCH, {"public_test_cases": "["}, "field 'public_test_cases': not JSON in a text"),
        (LIVECODEBENCH, {"public_test_cases": "{}"}, "field 'public_test_cases': dict instead of a JSON list"),
        (LIVECODEBENCH, {"metadata": "[]"}, "field 'metadata': list instead of a JSON dict"),
        (LIVECODEBENCH, {"public_test_cases": "[]", "private_test_cases": "[]"}, "there is no test"),
        (LIVECODEBENCH, {"private_test_cases": '[{"input": "1"}]'}, "test 2 needs the texts input, output, testtype"),
        (FUNCTIONAL, {"metadata": "{}"}, "field 'metadata': func_name None must be the name"),
        (
            FUNCTIONAL,
            {"public_test_cases": json.dumps(STDIN_TESTS)},
            "testtype must be stdin or functional in all tests",
        ),
        (HUMANEVAL, {"entry_point": "a b"}, "field 'entry_point': 'a b' is no name of a function"),
        (HUMANEVAL, {"test": "def check(:"}, "field 'test': not Python"),
        (HUMANEVAL, {"canonical_solution": 1}, "field 'canonical_solution': 1 must be a text"),
    ],
)
def test_a_faulty_problem_is_refused_with_line_and_field(
    record: dict[str, Any], change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    key = "task_id" if record is HUMANEVAL else "question_id"
    other = record | {key: "other"} if key not in change and change else record
    with pytest.raises(SuiteError) as caught:
        open_records(tmp_path, record, other | change)
    assert str(caught.value).startswith(str(tmp_path / "tiny.jsonl, line 2"))
    assert said in str(caught.value)


async def test_without_a_sandbox_nothing_is_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(code: str, tests: Sequence[str], limits: Limits) -> Verdict:
        raise SandboxRefused("no seccomp")

    monkeypatch.setattr(code_tests, "run_tests", refuse)
    engine = ScriptedEngine()
    plan = EvaluationPlan("policy", (), (), (1,), (1,))
    suite = replace(open_records(tmp_path, HUMANEVAL), problems=[])
    with pytest.raises(InvalidRequest, match="no sandbox for them: no seccomp"):
        await EvaluationContext.of(suite, plan, engine, None, Sampling(), 1)


def test_without_the_package_humaneval_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reasoner.evaluation.suites.files.humaneval.PACKAGE", "no-such-package-of-ours")
    with pytest.raises(SuiteError, match="pip install no-such-package-of-ours"):
        open_suite("humaneval", limit=1)
