"""Recipe of the policy that thinks: its traces are right, its targets are the expert's, and errors are corrected."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer

from reasoner.evaluation.suites.countdown import after, canonical, good_moves, moves
from reasoner.evaluation.suites.problem import Problem, split_of
from reasoner.evaluation.suites.registry import check_answer
from recipes.bundled import tokenizer as tok
from recipes.bundled.data import Example
from recipes.bundled.relabel import own_example, sampled_problem
from recipes.bundled.thoughts import CLOSE, LONGEST, OPEN, Trace, sample_problem, thinking_example
from tests.seeds import keep, shift

MOVE = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+), left ([\d ]+)")
SEED = 5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tok.build_thinking()


def searched(tokenizer: Tokenizer, index: int) -> tuple[Problem, Trace]:
    problem = sample_problem(random.Random(shift(f"test/{index}")), f"test/{index}")
    trace = Trace(tokenizer, problem, random.Random(shift(index)))
    trace.search()
    return problem, trace


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


def test_the_tokenizer_has_the_ids_of_the_other_models_and_one_token_for_each_delimiter(tokenizer: Tokenizer) -> None:
    base = tok.load()
    for index in range(20):
        text = sample_problem(random.Random(shift(index)), str(index)).text
        assert tokenizer.encode(text).ids == base.encode(text).ids
    for delimiter in tok.THOUGHT_TOKENS:
        [token] = tokenizer.encode(delimiter, add_special_tokens=False).ids
        assert token >= base.get_vocab_size()


def test_every_line_of_a_trace_is_a_legal_move_from_the_numbers_before_it(tokenizer: Tokenizer) -> None:
    for index in range(60):
        problem, trace = searched(tokenizer, index)
        numbers = given = list(problem.data["numbers"])
        lines = decode(tokenizer, trace.ids).split("\n")
        assert lines[-1] == f"Therefore {problem.data['target']} works."
        for line in lines[:-1]:
            if match := MOVE.fullmatch(line):
                a, op, b, result = int(match[1]), match[2], int(match[3]), int(match[4])
                assert (a, op, b, result) in set(moves(numbers))
                numbers = after(numbers, a, b, result)
                assert match[5] == " ".join(map(str, numbers))
            elif line.startswith("Alternatively"):
                numbers = given
                assert line == "Alternatively, from " + " ".join(map(str, given))
            elif line.startswith("Wait"):
                numbers = [int(number) for number in re.findall(r"\d+", line)]
                assert 2 < len(numbers) < len(given)
            else:
                tried = line.split(", ")
                assert tried == [f"{a} {op} {b} = {result}" for a, op, b, result in moves(numbers)][: len(tried)]
        assert lines[-2].endswith(f" = {problem.data['target']}")
        # The expert finishes from ``LONGEST`` on, in at most one return and three lines.
        assert len(trace.ids) < LONGEST + 80


def test_traces_go_astray_and_come_back(tokenizer: Tokenizer) -> None:
    texts = [decode(tokenizer, searched(tokenizer, index)[1].ids) for index in range(60)]
    assert sum("Wait" in text or "Alternatively" in text for text in texts) > 30
    assert sum(len(text.split("\n")) < 8 for text in texts) > 5


def shares(example: Example) -> dict[int, dict[int, float]]:
    found: dict[int, dict[int, float]] = {}
    for index, token, share in example.choices:
        assert token not in found.setdefault(index, {})
        found[index][token] = share
    return found


def test_the_experts_choices_keep_the_target_in_reach_and_sum_to_one(tokenizer: Tokenizer) -> None:
    for index in range(60):
        problem, trace = searched(tokenizer, index)
        begin = {at for at, _, _ in trace.choices}
        by_place: dict[int, dict[int, float]] = {}
        for at, token, share in trace.choices:
            by_place.setdefault(at, {})[token] = share
        assert all(sum(choice.values()) == pytest.approx(1) for choice in by_place.values())
        first = by_place[0]  # the root, where nothing was tried
        good = good_moves(problem.data["numbers"], problem.data["target"])
        assert {decode(tokenizer, [token]) for token in first} == {str(move[0]) for move in good}
        assert begin <= set(range(len(trace.ids)))


def test_examples_end_in_a_right_answer_and_their_targets_are_their_next_tokens(tokenizer: Tokenizer) -> None:
    kinds = set()
    for index in range(120):
        example = thinking_example(tokenizer, SEED, index)
        name = f"thinking/{SEED}/{index}"
        problem = sample_problem(random.Random(keep(name, "the recipe's own")), name)
        assert split_of(canonical(problem.data["numbers"], problem.data["target"])) == "train"
        whole = [*example.ids, tok.END]
        assert all(token == whole[position + 1] for position, token in example.targets)
        assert all(sum(choice.values()) == pytest.approx(1) for choice in shares(example).values())
        thought, _, answer = decode(tokenizer, example.ids).partition("</think>\n\n")
        has_thought = OPEN in thought
        kinds.add((has_thought, thought.endswith("works.\n"), answer.startswith("Final answer")))
        stated = answer[answer.index("\\boxed{") + len("\\boxed{") :].removesuffix("}")
        assert check_answer(problem, stated)
        assert len(example.ids) < 2048
    assert len(kinds) >= 4  # with a thought, without, cut short, asked at once


def test_the_end_of_a_thought_that_found_nothing_is_no_target(tokenizer: Tokenizer) -> None:
    [closing] = [token for token in tokenizer.encode(CLOSE, add_special_tokens=False).ids if token > 826]
    learned = unlearned = 0
    for index in range(200):
        example = thinking_example(tokenizer, SEED, index)
        text = decode(tokenizer, example.ids)
        if OPEN not in text or "Final answer" in text:
            continue
        is_target = closing in {token for _, token in example.targets}
        has_found = "works.\n</think>" in text
        assert is_target is has_found
        learned, unlearned = learned + has_found, unlearned + (not has_found)
    assert learned > 20
    assert unlearned > 20


def own_thought(tokenizer: Tokenizer, index: int) -> tuple[Problem, list[int]]:
    problem = sampled_problem(index)
    trace = Trace(tokenizer, problem, random.Random(shift(index)))
    trace.search()
    return problem, trace.ids


def targets_of(tokenizer: Tokenizer, index: int, ids: list[int]) -> tuple[Example, int]:
    """Return the example of an own thought, and the position of the thought's first token."""
    example = own_example(tokenizer, index, ids)
    assert example is not None
    opening = tokenizer.encode(OPEN, add_special_tokens=False).ids
    return example, len(tok.encode_prompt(tokenizer, sampled_problem(index).text)) + len(opening)


def test_a_right_thought_of_its_own_is_followed_to_its_end_and_differs_only_in_where_it_returns(
    tokenizer: Tokenizer,
) -> None:
    returns = tok.token_id(tokenizer, "Wait"), tok.token_id(tokenizer, "Alternatively")
    newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
    other = 0
    for index in range(40):
        _, ids = own_thought(tokenizer, index)
        example, begin = targets_of(tokenizer, index, ids)
        assert example.ids[begin : begin + len(ids)] == ids
        by_index = shares(example)
        for row, (position, token) in enumerate(example.targets):
            if row in by_index or position + 1 >= len(example.ids) or token == example.ids[position + 1]:
                continue
            line = position
            while example.ids[line] != newline:
                line -= 1
            assert example.ids[line + 1] in returns
            other += 1
        assert all(sum(choice.values()) == pytest.approx(1) for choice in by_index.values())
    assert other > 5


def test_the_moment_that_a_thought_overlooks_its_target_is_corrected(tokenizer: Tokenizer) -> None:
    overlooked = 0
    for index in range(40):
        problem, ids = own_thought(tokenizer, index)
        lines = decode(tokenizer, ids).split("\n")
        if f" = {problem.data['target']}," in "\n".join(lines[:-2]):
            continue
        wrong = "\n".join([*lines[:-2], lines[-2] + ", 1 + 1 = 2", "Alternatively, from 1 1", ""])
        spoiled = tokenizer.encode(wrong, add_special_tokens=False).ids
        place = next(at for at, (a, b) in enumerate(zip(ids, spoiled, strict=False)) if a != b)
        example, begin = targets_of(tokenizer, index, spoiled)
        assert decode(tokenizer, [dict(example.targets)[begin + place - 1]]) == "\n"
        assert example.ids[begin : begin + place] == ids[:place]
        overlooked += 1
    assert overlooked > 20


def test_an_error_ends_an_own_thought_and_its_target_is_the_right_token(tokenizer: Tokenizer) -> None:
    corrected = 0
    for index in range(40):
        _, ids = own_thought(tokenizer, index)
        text = decode(tokenizer, ids)
        match = MOVE.search(text)
        if match is None:
            continue
        wrong = text[: match.start(4)] + str((int(match[4]) + 7) % 400) + text[match.end(4) :]
        spoiled = tokenizer.encode(wrong, add_special_tokens=False).ids
        place = next(at for at, (a, b) in enumerate(zip(ids, spoiled, strict=False)) if a != b)
        example, begin = targets_of(tokenizer, index, spoiled)
        by_position = dict(example.targets)
        if f"{match[1]} {match[2]} {match[3]} = " in text[: match.start()] or place > 12:
            continue
        corrected += 1
        assert decode(tokenizer, [by_position[begin + place - 1]]) == match[4]
        assert example.ids[begin : begin + place] == ids[:place]
        assert spoiled[place] not in example.ids[begin + place : begin + place + 1]
    assert corrected > 20
