"""The accuracy of rules on n of N samples, against the mean over all subsets, and the gap that is closed."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.selection.report import measure, write_report
from benchmarks.selection.rules import best_at, pass_at, vote_at
from tests.seeds import shift

_SAMPLES = st.lists(
    st.tuples(st.booleans(), st.sampled_from([None, 0.1, 0.5, 0.9]), st.sampled_from([None, 0, 1, 2])),
    min_size=1,
    max_size=7,
)


@given(_SAMPLES, st.data())
def test_the_closed_forms_are_the_means_over_all_subsets(
    samples: list[tuple[Any, Any, Any]], data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, len(samples)))
    right, scores, _ = (list(column) for column in zip(*samples, strict=True))
    passed, best = [], []
    for subset in itertools.combinations(range(len(samples)), n):
        passed.append(any(right[index] for index in subset))
        scored = [index for index in subset if scores[index] is not None]
        top = max((scores[index] for index in scored), default=None)
        leaders = [right[index] for index in scored if scores[index] == top]
        best.append(sum(leaders) / len(leaders) if leaders else 0.0)
    assert pass_at(right, n) == pytest.approx(sum(passed) / len(passed))
    assert best_at(right, scores, n) == pytest.approx(sum(best) / len(best))


def test_votes_of_all_samples_are_exact_and_ties_are_shared() -> None:
    rng = random.Random(shift(0))
    right, classes = [True, True, False, False, False], [0, 0, 1, 1, None]
    assert vote_at(right, classes, 5, rng) == 0.5
    assert vote_at(right, classes, 5, rng, [0.2, 0.2, 0.1, 0.1, None]) == 1.0
    assert vote_at(right, classes, 5, rng, [None] * 5) == 0.5
    assert vote_at([False], [None], 1, rng) == 0.0


def make_item(problem: int, scores: list[float | None]) -> dict[str, Any]:
    """Return 16 samples of a problem: 4 are right, 8 have the same wrong answer."""
    return {
        "suite": "s",
        "seed": 0,
        "problem": str(problem),
        "right": [True] * 4 + [False] * 12,
        "classes": [0] * 4 + [1] * 8 + [None] * 4,
        "tokens": [10] * 16,
        "seconds": 2.0,
        "scores": {"graded": scores},
        "costs": {"graded": {"computed": 32, "cached": 608, "seconds": 1.0}},
        "tournament": None,
    }


def test_a_verifier_that_knows_closes_the_gap_and_one_that_cannot_read_does_not(tmp_path: Any) -> None:
    knows = measure([make_item(problem, [0.9] * 4 + [0.2] * 8 + [None] * 4) for problem in range(5)])
    row = next(row for row in knows if (row.rule, row.n) == ("graded", 8))
    assert row.accuracy == row.reached
    assert row.gap == pytest.approx(1.0)
    assert (row.more_tokens, row.cached, row.scored) == (0.2, 0.95, 1.0)
    assert row.seconds == 0.5
    blind = measure([make_item(problem, [None] * 16) for problem in range(5)])
    row = next(row for row in blind if (row.rule, row.n) == ("graded", 16))
    assert row.accuracy == pytest.approx(4 / 12)  # any that has an answer
    assert row.scored == 0.0
    (tmp_path / "s.jsonl").write_text("")
    assert write_report(tmp_path).startswith("| suite | rule |")
