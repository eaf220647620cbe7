"""A solution that follows the instruction is read as it was meant."""

from __future__ import annotations

import pytest

from reasoner.answers.extraction.extract import extract_answer
from reasoner.answers.instruction import find_instruction
from reasoner.answers.spec import AnswerSpec

FOLLOWED = [
    ({"compare": "math"}, "\\boxed{}", "So \\boxed{18}.", "18"),
    ({"compare": "text"}, "\\boxed{}", "So \\boxed{Paris}.", "Paris"),
    ({"compare": "choice"}, "The answer is (X)", "It is warm.\n\nThe answer is (C).", "C"),
    ({"compare": "code"}, "```", "Look:\n```\nx = 1\n```", "x = 1"),
    ({"extract": "boxed"}, "\\boxed{}", "So \\boxed{18}.", "18"),
    ({"extract": "phrase"}, "The answer is", "The answer is 18.", "18"),
    ({"extract": "hash"}, "####", "9 * 2 = 18\n#### 18", "18"),
    ({"extract": "choice"}, "The answer is (X)", "The answer is (B).", "B"),
    ({"extract": {"code": "json"}}, "```json", 'See\n```json\n{"a": 1}\n```', '{"a": 1}'),
]


@pytest.mark.parametrize(("fields", "words", "solution", "answer"), FOLLOWED)
def test_an_answer_stated_as_instructed_is_found(fields: object, words: str, solution: str, answer: str) -> None:
    spec = AnswerSpec.model_validate(fields)
    instruction = find_instruction(spec)
    assert instruction is not None
    assert words in instruction
    assert extract_answer(solution, spec) == answer


@pytest.mark.parametrize("compare", ["math", "text", "choice", "code"])
def test_a_model_that_repeats_the_instruction_states_no_answer(compare: str) -> None:
    spec = AnswerSpec.model_validate(compare)
    instruction = find_instruction(spec)
    assert instruction is not None
    assert extract_answer(instruction, spec) is None


def test_there_is_none_for_a_pattern_or_if_switched_off() -> None:
    assert find_instruction(AnswerSpec.model_validate({"extract": {"regex": "(a)"}})) is None
    assert find_instruction(AnswerSpec(instruct=False)) is None
