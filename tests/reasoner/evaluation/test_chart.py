"""Labels of the evaluation's chart do not overlap, whatever the range of tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest

from reasoner.evaluation.chart import set_token_ticks
from tests.long import mostly_long_grid


@pytest.mark.parametrize(
    ("low", "ratio"),
    mostly_long_grid(
        [1.0, 7.0, 55.0, 104.0, 930.0, 12_000.0], [1.05, 1.3, 2.0, 3.0, 8.0, 40.0, 300.0, 1e4, 1e6, 1e8], every=7
    ),
)
def test_ticks_of_the_tokens_are_few_and_apart(low: float, ratio: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6.6, 5.6), layout="constrained")
    try:
        panel.set_xscale("log")
        panel.set_xlim(low, low * ratio)
        set_token_ticks(panel)
        figure.draw_without_rendering()
        labels = [label for label in panel.get_xticklabels(which="both") if label.get_text()]
        boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.x0)
        texts = [label.get_text() for label in labels]
    finally:
        pyplot.close(figure)
    assert 2 <= len(texts) <= 7
    assert len(set(texts)) == len(texts)
    assert all(left.x1 + 2 < right.x0 for left, right in pairwise(boxes)), texts
    assert not any("10^" in text for text in texts)
