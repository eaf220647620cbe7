"""Recipe of the policy that calls Python: right solutions, recorded outputs, and targets of the model's own text."""

from __future__ import annotations

import ast
import contextlib
import io
import random
import re
from typing import Any

import pytest
from tokenizers import Tokenizer

from reasoner.evaluation.suites.arithmetic import LEVELS, canonical, generate_problem
from reasoner.evaluation.suites.problem import Problem, split_of
from reasoner.evaluation.suites.registry import check_answer
from reasoner.jobs.tool_specs import PYTHON_INSTRUCTION
from reasoner.tools.fences import find_call
from recipes.bundled import SHIPPED as FOLDER
from recipes.bundled import model
from recipes.bundled import tokenizer as tok
from recipes.bundled.calls import python_example, sample_problem, write_parts
from recipes.bundled.data import Example
from recipes.bundled.measure_python import Attempt, Solver, measure
from recipes.suites.arithmetic import sample_calls
from recipes.suites.steps import boxed
from tests.seeds import shift
from workers.config.settings import load_settings

transformers = pytest.importorskip("transformers")

SHIPPED = FOLDER / "policy-python"
SEED = 5
INJECTED = re.compile(r"```output\n(.*?)\n```\n", re.DOTALL)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tok.build_python()


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text


def run(cell: str, namespace: dict[str, Any]) -> str:
    """Return what trusted code of the recipe prints."""
    ast.parse(cell)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(cell, namespace)
    return printed.getvalue()


def problems(count: int) -> list[tuple[Problem, random.Random]]:
    return [
        (generate_problem("train", f"test/{seed}", level), random.Random(shift(f"{seed}/{level}")))
        for seed in range(count)
        for level in LEVELS
    ]


def test_cells_print_the_recorded_outputs_and_the_last_one_is_the_answer() -> None:
    numbers_of_calls = set()
    for problem, rng in problems(120):
        calls = sample_calls(problem, rng)
        namespace: dict[str, Any] = {}
        for call in calls:
            assert run(call.code, namespace) == f"{call.output}\n", (problem, call)
            assert call.plan.endswith(".")
            assert "\n" not in call.plan
        assert calls[-1].output == problem.answer
        numbers_of_calls.add(len(calls))
    assert numbers_of_calls == {1, 2}


def test_solutions_have_the_services_format_and_end_in_the_right_answer() -> None:
    cell = r"[A-Z][a-z, ]+\.\n```python\n(?:[a-z]+ = [^\n]+\n)*print\([^\n]+\)\n```\n```output\n\d+\n```\n"
    for problem, rng in problems(60):
        text = "".join(part.text for part in write_parts(problem, rng))
        assert re.fullmatch(rf"{cell}(?:\n{cell})?\n\\boxed\{{\d+\}}", text), text
        assert check_answer(problem, boxed(text.split(tok.SEPARATOR)[-1]))


def test_the_service_finds_the_calls_and_the_other_parts_are_their_outputs() -> None:
    for problem, rng in problems(30):
        for part in write_parts(problem, rng):
            assert part.is_injected == bool(INJECTED.fullmatch(part.text))
            assert (find_call(part.text) is not None) == (not part.is_injected and "boxed" not in part.text)


def find_targets(example: Example) -> set[int]:
    """Return the indices of the tokens that are targets, the end included."""
    return {position + 1 for position, _ in example.targets}


def test_masks_cover_exactly_the_outputs(tokenizer: Tokenizer) -> None:
    kinds = set()
    for index in range(150):
        example = python_example(tokenizer, SEED, index)
        whole = [*example.ids, tok.END]
        assert all(token == whole[position + 1] for position, token in example.targets)
        targets, begin = find_targets(example), whole.index(tok.ASSISTANT) + 1
        assert min(targets) == begin
        text = decode(tokenizer, whole[begin:-1])
        masked = "".join(decode(tokenizer, [whole[at]]) for at in range(begin, len(whole)) if at not in targets)
        assert masked == "".join(match[0] for match in INJECTED.finditer(text))
        has_python = "```python" in text
        assert has_python == (decode(tokenizer, whole).startswith(f"<|system|>{PYTHON_INSTRUCTION}<|user|>"))
        assert has_python == bool(masked)
        problem, _ = sample_problem(SEED, index)
        assert split_of(canonical(problem.data["template"], problem.data["numbers"])) == "train"
        assert check_answer(problem, boxed(text.split(tok.SEPARATOR)[-1]))
        kinds.add(has_python)
    assert kinds == {True, False}


def test_examples_are_short_and_a_solution_takes_fewer_than_150_tokens(tokenizer: Tokenizer) -> None:
    for index in range(300):
        example = python_example(tokenizer, SEED, index)
        assert len(example.ids) < 256
        assert len(example.ids) - example.ids.index(tok.ASSISTANT) < 150


def test_text_has_the_same_tokens_whole_and_in_the_parts_that_the_service_joins(tokenizer: Tokenizer) -> None:
    for problem, rng in problems(40):
        parts = [part.text for part in write_parts(problem, rng)]
        joined = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False).ids]
        assert tokenizer.encode("".join(parts), add_special_tokens=False).ids == joined


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("48271936", ["48", "271", "936"]),
        ("7", ["7"]),
        ("1000000", ["1", "000", "000"]),
        ("a = 5005 // 100", ["a", " = ", "5", "005", " // ", "100"]),
        ("```python\n", ["```python", "\n"]),
        ("```\n```output\n", ["```", "\n", "```output", "\n"]),
        ("\n\n\\boxed{12}", ["\n", "\n", "\\boxed{", "12", "}"]),
    ],
)
def test_numbers_are_groups_of_three_digits_from_the_right(tokenizer: Tokenizer, text: str, pieces: list[str]) -> None:
    encoded = tokenizer.encode(text, add_special_tokens=False).ids
    assert [decode(tokenizer, [token]) for token in encoded] == pieces


def test_the_tokenizer_round_trips_any_text_and_keeps_the_special_tokens(tokenizer: Tokenizer) -> None:
    for text in (
        "",
        "  \t\r\n\n\n 007 1,234.5 `x` ````",
        "Gr\u00f6\u00dfe \u6771\u4eac \U0001f600",
        "".join(map(chr, range(1, 0x800))),
    ):
        assert decode(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids) == text
    assert [tokenizer.token_to_id(token) for token in tok.SPECIAL] == list(range(len(tok.SPECIAL)))


class ScriptedSolver(Solver):
    """Solver whose model writes a given text, whatever it is asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        shape = model.Shape(width=64, layers=1, heads=2, kv_heads=1, inner=64, vocabulary=tokenizer.get_vocab_size())
        super().__init__(model.Backbone(shape), tokenizer)

    async def run_text(self, problem: Problem, text: str) -> Attempt:
        attempt = Attempt(problem, [], self.tokenizer.encode(text, add_special_tokens=False).ids)
        await self._run_call(attempt)
        return attempt


async def test_the_measurement_runs_calls_and_injects_what_they_print(tokenizer: Tokenizer) -> None:
    problem, _ = problems(1)[0]
    solver = ScriptedSolver(tokenizer)
    text = "Add.\n```python\ntotal = 123456 + 1\nprint(total)\n```"
    attempt = await solver.run_text(problem, text)
    assert decode(tokenizer, attempt.written) == f"{text}\n```output\n123457\n```\n"
    assert (attempt.num_errors, attempt.is_finished) == (0, False)
    attempt = await solver.run_text(problem, "Add.\n```python\nprint(1 / 0)\n```")
    assert "ZeroDivisionError" in decode(tokenizer, attempt.written)
    assert attempt.num_errors == 1
    assert (await solver.run_text(problem, "Add. ```")).is_finished


def test_the_shipped_chat_template_gives_the_recipes_prompt() -> None:
    shipped = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    [(problem, _), *_] = problems(1)
    user = {"role": "user", "content": problem.text}
    for system in (None, PYTHON_INSTRUCTION):
        messages = [user] if system is None else [{"role": "system", "content": system}, user]
        rendered = shipped.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ours = tok.encode_prompt(tok.build_python(), problem.text, system)
        assert shipped.encode(rendered, add_special_tokens=False) == ours


def test_the_shipped_model_solves_held_out_problems_by_calling_python() -> None:
    backbone, _ = model.load(SHIPPED)
    found = measure(backbone, Tokenizer.from_file(str(SHIPPED / "tokenizer.json")), 18)
    assert found["with Python, all"] >= 0.8
    assert found["solutions without a call"] == 0
    assert found["with Python, tokens"] < 150
    assert found["without, all"] < found["with Python, all"]


def test_the_shipped_model_has_no_verifier_and_the_bare_question_as_prompt() -> None:
    settings = load_settings(model="policy-python")
    assert settings.default_verifier("policy-python") is None
    assert settings.models["policy-python"].prompt == "{problem}"
