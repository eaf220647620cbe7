"""The largest logits of each row, and the weights of its tokens relative to the likeliest one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]

_DEEPEST = 64
"""Most tokens of a block whose maximum is taken on the way to a row's largest logits."""


def relative_weights(x: Logits, top: Logits, temperature: Floats) -> Logits:
    """``exp((x - top) / temperature)`` in float32, ``[rows, vocab]``: 1 for the likeliest token of a row."""
    weights = x - top[:, None]
    # At a temperature of almost nothing everything but the top, whose difference is 0, becomes 0. At one that is almost
    # infinite an impossible token stays impossible.
    weights *= (1 / temperature).clip(min=1e-37, max=3e38).astype(np.float32)[:, None]
    np.exp(weights, out=weights)
    return weights


def largest(x: Logits, count: int) -> tuple[Ints, Logits]:
    """The ``count`` tokens with the largest logits of each row and these, descending; of equal ones the smaller ids."""
    row, column, place, shape = _within_reach(x, count)
    tokens = np.zeros(shape, np.int64)
    tokens[row, place] = column
    logits = np.full(shape, -np.inf, np.float32)
    logits[row, place] = x[row, column]
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    return np.take_along_axis(tokens, order, axis=-1), np.take_along_axis(logits, order, axis=-1)


def _within_reach(x: Logits, count: int) -> tuple[Ints, Ints, Ints, tuple[int, int]]:
    """Rows and tokens of few logits among which the ``count`` largest of each row are, the places of these within their
    rows, and the shape of a matrix that holds them.

    The ``count``-th largest of the maxima of disjoint blocks is at most the ``count``-th largest logit, and not much
    less; only what reaches it is looked at.
    """
    rows, vocab = x.shape
    depth = max(1, min(_DEEPEST, vocab // (2 * count)))
    blocks = vocab // depth
    maxima = x[:, : depth * blocks].reshape(rows, depth, blocks).max(axis=1)
    bound = np.partition(maxima, blocks - count, axis=-1)[:, blocks - count]
    row, column = np.divmod(np.flatnonzero(x >= bound[:, None]), vocab)
    counts = np.bincount(row, minlength=rows)
    place = np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)
    return row, column, place, (rows, int(counts.max()))
