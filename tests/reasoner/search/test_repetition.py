"""Detection of loops in generated text, and texts that only resemble one."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasoner.repetition import (
    MAX_PERIOD,
    MAX_POOR_VOCABULARY,
    MIN_LOOP_TOKENS,
    MIN_POOR_LOOP_TOKENS,
    MIN_REPEATS,
    WINDOW_TOKENS,
    ends_in_loop,
)
from tests.seeds import shift


def tokens(text: str) -> list[int]:
    """Split a text into words, digits and single characters, about as a tokenizer does."""
    pieces = re.findall(r" ?[A-Za-z]+| ?\d|\s+|.", text)
    known = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return [known[piece] for piece in pieces]


def loops_by_trying_everything(text: Sequence[int]) -> bool:
    """Detect a loop by its definition, trying every period: the text ends in a piece repeated for long enough."""
    text = text[-WINDOW_TOKENS:]
    for period in range(1, len(text) // MIN_REPEATS + 1):
        same = 0
        while same + period < len(text) and text[-1 - same] == text[-1 - same - period]:
            same += 1
        poor = len(set(text[-period:])) <= MAX_POOR_VOCABULARY
        if same + period >= max(MIN_LOOP_TOKENS, MIN_REPEATS * period, MIN_POOR_LOOP_TOKENS if poor else 0):
            return True
    return False


SENTENCE = "Wait, let me check that again: the sum of the two numbers is 12, so the product must be 35. "
LEGITIMATE = {
    "a list of zeros": "0 0 0 0 0 0 0 0 " * 20,
    "a ruler": "-" * 900,
    "an empty matrix": ("0 & " * 15 + "0 \\\\\n") * 16,
    "an identity matrix": "\n".join(" ".join("1" if i == j else "0" for j in range(24)) for i in range(24)),
    "a recurring decimal": "1/7 = 0." + "142857" * 40,
    "a long division": "".join(f"{10 * r} / 17 = {10 * r // 17} remainder {10 * r % 17}\n" for r in range(1, 17)),
    "a table of squares": "".join(f"| {i} | {i * i} | {i**3} |\n" for i in range(120)),
    "a table with one changing column": "".join(f"| {i} | N/A | not applicable | - | 0.0 |\n" for i in range(60)),
    "steps with a counter": "".join(f"Step {i}: we add 3 to the running total and get {3 * i}.\n" for i in range(60)),
    "all cases of three coins": "heads, heads, tails; " * 8,
    "a song": (SENTENCE.upper() + "And on that farm he had a cow, ee i ee i oh. ") * 4,
    "unrolled code": "    total += values[i]; i += 1\n" * 12,
}
LOOPS = {
    "a sentence": "So. " + SENTENCE * 30,
    "a short phrase": "Hmm, I think that it must be the other one then. " * 60,
    "a word for ever": "no " * 2000,
    "a paragraph": ("Let us try another way. " + SENTENCE * 3) * 12,
    "a loop after much good text": "".join(f"Step {i}: {i * i}.\n" for i in range(200)) + SENTENCE * 20,
}


@pytest.mark.parametrize("text", LEGITIMATE.values(), ids=LEGITIMATE.keys())
def test_a_regular_text_is_no_loop_at_any_prefix(text: str) -> None:
    read = tokens(text)
    assert not any(ends_in_loop(read[:end]) for end in range(0, len(read) + 1, 7))


@pytest.mark.parametrize("text", LOOPS.values(), ids=LOOPS.keys())
def test_a_loop_is_detected_wherever_the_text_is_cut(text: str) -> None:
    read = tokens(text.rstrip())
    assert all(ends_in_loop(read[: len(read) - cut]) for cut in range(40))


def test_a_text_that_left_its_loop_is_no_loop() -> None:
    assert not ends_in_loop(tokens(SENTENCE * 30 + "But that is enough of this."))


def test_the_longest_period_is_detected_exactly_at_its_last_needed_token() -> None:
    rng = random.Random(shift(7))
    piece = [rng.randrange(10_000) for _ in range(MAX_PERIOD)]
    text = piece * MIN_REPEATS
    assert ends_in_loop([1, 2, 3, *text])
    assert not ends_in_loop(text[1:])


@given(
    lead=st.integers(0, 60),
    alphabet=st.integers(1, 12),
    period=st.integers(1, 200),
    rounds=st.integers(1, 40),
    change=st.one_of(st.none(), st.integers(0, 2000)),
    seed=st.integers(0, 1000),
)
def test_the_detector_agrees_with_trying_every_period(
    lead: int, alphabet: int, period: int, rounds: int, change: int | None, seed: int
) -> None:
    rng = random.Random(shift(seed))
    piece = [rng.randrange(alphabet) for _ in range(period)]
    text = [rng.randrange(alphabet) for _ in range(lead)] + (piece * rounds)[:3000]
    if change is not None and change < len(text):
        text[change] = -1
    assert ends_in_loop(text) == loops_by_trying_everything(text)
