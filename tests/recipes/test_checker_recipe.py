"""Recipe of the generative verifier: its critiques calculate rightly, and their verdicts are the exact rule's."""

from __future__ import annotations

import json
import random
from collections import defaultdict

import pytest
from tokenizers import Tokenizer

from prm.scorers.templates import PromptTemplate
from prm.scorers.verdict_formats import NOTE as NOTE_KEY
from reasoner.evaluation.suites.countdown import check, generate_problem
from reasoner.evaluation.suites.problem import Problem
from recipes.bundled import SHIPPED, critiques
from recipes.bundled import tokenizer as tok
from recipes.bundled.checker import NOTE
from recipes.bundled.critiques import (
    check_example,
    check_prompt,
    compare_example,
    compare_prompt,
    is_right,
    redo_step,
    reduce_expression,
)
from recipes.bundled.data import Example, countdown_attempt
from recipes.bundled.measure_checker import measure
from recipes.suites import countdown
from recipes.suites.steps import boxed
from tests.seeds import shift


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tok.build_checker()


def attempt(index: int) -> tuple[Problem, list[str], random.Random]:
    rng = random.Random(shift(index))
    problem = generate_problem("train", f"test/{index}", rng.choice(("n3", "n4", "n5")))
    return problem, countdown_attempt(problem, rng, []), rng


def read(tokenizer: Tokenizer, example: Example) -> tuple[str, str, list[int]]:
    """Return the prompt, the critique with its verdict, and all token ids."""
    ids = [*example.ids, example.targets[-1][1]]
    prompt, critique = tokenizer.decode(ids, skip_special_tokens=False).split("<|assistant|>")
    return prompt.removeprefix("<|user|>"), critique, ids


def label_shares(tokenizer: Tokenizer, example: Example) -> dict[str, float]:
    last = len(example.targets) - 1
    return {tokenizer.decode([token])[2:]: share for at, token, share in example.choices if at == last}


def test_the_labels_of_verdicts_are_single_tokens(tokenizer: Tokenizer) -> None:
    for label in (*critiques.LABELS, *critiques.PAIR_LABELS):
        before, after = (
            tokenizer.encode(text, add_special_tokens=False).ids
            for text in (critiques.VERDICT, critiques.VERDICT + label)
        )
        assert after[:-1] == before


def test_a_text_that_is_read_again_has_the_tokens_that_were_trained(tokenizer: Tokenizer) -> None:
    for index in range(150):
        problem, steps, rng = attempt(index)
        other = countdown_attempt(problem, rng, [])
        for example in (
            check_example(tokenizer, problem, steps, rng),
            check_example(tokenizer, problem, steps[: rng.randrange(1, len(steps))], rng),
            compare_example(tokenizer, problem, steps, other, rng),
        ):
            prompt, critique, ids = read(tokenizer, example)
            again = tokenizer.encode(critique, add_special_tokens=False).ids
            assert tok.encode_prompt(tokenizer, prompt) + again == ids
            totals: dict[int, float] = defaultdict(float)
            for at, _, share in example.choices:
                totals[at] += share
            assert all(total == pytest.approx(1.0) for total in totals.values())
            assert len(ids) < 512


def test_the_verdicts_are_those_of_the_rule(tokenizer: Tokenizer) -> None:
    seen = set()
    for index in range(150):
        problem, steps, rng = attempt(index)
        other = countdown_attempt(problem, rng, [])
        finished = check(problem, boxed(steps[-1]))
        assert label_shares(tokenizer, check_example(tokenizer, problem, steps, rng))["Yes" if finished else "No"] == 1
        beginning = steps[: rng.randrange(1, len(steps))]
        alive = countdown.label_steps(problem, beginning)[-1]
        shares = label_shares(tokenizer, check_example(tokenizer, problem, beginning, rng))
        assert shares == {"Yes" if alive else "No": 1.0}
        shares = label_shares(tokenizer, compare_example(tokenizer, problem, steps, other, rng))
        rights = finished, is_right(problem, other)
        seen.add(rights)
        assert shares.get("A", 0.0) == {(True, False): 1.0, (False, True): 0.0}.get(rights, 0.5)
    assert len(seen) == 4


def test_a_critique_with_an_answer_says_makes_only_if_it_does(tokenizer: Tokenizer) -> None:
    for index in range(150):
        problem, steps, rng = attempt(index)
        _, critique, _ = read(tokenizer, check_example(tokenizer, problem, steps, rng))
        if ", used" in critique:
            used, given = critique.split(", used ")[1].split("\n")[0].split(" of ")
            assert (used == given) == critique.endswith("Yes")
        elif "misses" in critique or "breaks" in critique:
            assert critique.endswith("No")


def test_calculations_are_redone_and_what_is_no_calculation_breaks() -> None:
    assert reduce_expression("(7 * 3) + (8 / 4)") == (["7 * 3 = 21", "8 / 4 = 2", "21 + 2 = 23"], 23, [7, 3, 8, 4])
    for text in (None, "", "x", "7 / 2", "2 - 3", "400 + 400", "7 ** 2", "1 / 0", "(", "(" * 500):
        assert reduce_expression(text)[1] is None
    assert redo_step([3, 4, 7], "7 * 3 = 21, left 4 21") == ("7 * 3 = 21, left 4 21", [4, 21])
    assert redo_step([3, 4, 7], "7 * 3 = 22, left 4 22") == ("7 * 3 = 21, left 4 21, wrong", None)
    assert redo_step([3, 4, 7], "7 * 3 = 21, left 21") == ("7 * 3 = 21, left 4 21, wrong", None)
    assert redo_step([3, 4, 7], "8 * 3 = 24, left 4 7") == ("8 missing", None)
    assert redo_step([3, 4, 7], "3 * 3 = 9, left 4 7") == ("3 missing", None)
    assert redo_step([3, 4, 7], "3 - 7 = 4, left 4 4") == ("3 - 7, breaks", None)
    assert redo_step([3, 4, 7], "the answer is 21") == ("breaks", None)


def test_a_redone_step_is_wrong_exactly_where_the_step_is_illegal_or_miscalculated() -> None:
    for index in range(200):
        problem, steps, _ = attempt(index)
        numbers: list[int] | None = problem.data["numbers"]
        for step in steps[:-1]:
            assert numbers is not None
            expected = countdown.apply(numbers, step)
            assert redo_step(numbers, step)[1] == expected
            if expected is None:
                break
            numbers = expected


@pytest.mark.long
def test_the_shipped_checker_judges_held_out_answers_and_pairs_as_the_rule_does() -> None:
    found = measure(40)
    assert found["answers"] > 0.9
    assert found["pairs"] > 0.9
    assert found["beginnings"] > 0.7
    assert found["answers"] > found["answers, direct"]


def test_the_shipped_note_is_the_recipes() -> None:
    config = json.loads((SHIPPED / "checker" / "config.json").read_text())
    assert config[NOTE_KEY] == NOTE
    shipped = Tokenizer.from_file(str(SHIPPED / "checker" / "tokenizer.json"))
    assert shipped.get_vocab() == tok.build_checker().get_vocab()


def test_the_templates_of_its_note_write_the_prompts_that_were_trained() -> None:
    problem, steps, rng = attempt(1)
    other = countdown_attempt(problem, rng, [])
    first, second = (tok.SEPARATOR.join(part) for part in (steps, other))
    check_template = PromptTemplate(critiques.CHECK_PROMPT, (), ("question", "solution"))
    compare_template = PromptTemplate(critiques.COMPARE_PROMPT, (), ("question", "first", "second"))
    assert check_template.render({"question": problem.text, "solution": first}) == check_prompt(problem, steps)
    values = {"question": problem.text, "first": first, "second": second}
    assert compare_template.render(values) == compare_prompt(problem, steps, other)
