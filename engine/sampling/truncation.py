"""Top-k selection of logits, and weights of tokens relative to the likeliest one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]

_DEEPEST = 64
"""Maximum number of tokens of a block whose maximum is taken in the search for a row's largest logits."""


def relative_weights(x: Logits, top: Logits, temperature: Floats) -> Logits:
    """Return ``exp((x - top) / temperature)`` in float32, ``[rows, vocab]``: 1 for the likeliest token of a row."""
    weights = x - top[:, None]
    # Clipped so that a temperature near 0 leaves weight to the likeliest token alone, and one near infinity leaves none
    # to a token whose logit is minus infinity.
    weights *= (1 / temperature).clip(min=1e-37, max=3e38).astype(np.float32)[:, None]
    np.exp(weights, out=weights)
    return weights


def largest(x: Logits, count: int) -> tuple[Ints, Logits]:
    """Return the ``count`` tokens with the largest logits of each row and these logits, descending.

    Both ``[rows, count]``; of equal logits the smaller token ids are taken.
    """
    row, column, place, shape = _within_reach(x, count)
    tokens = np.zeros(shape, np.int64)
    tokens[row, place] = column
    logits = np.full(shape, -np.inf, np.float32)
    logits[row, place] = x[row, column]
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    return np.take_along_axis(tokens, order, axis=-1), np.take_along_axis(logits, order, axis=-1)


def _within_reach(x: Logits, count: int) -> tuple[Ints, Ints, Ints, tuple[int, int]]:
    """Return few candidates that include the ``count`` largest logits of each row.

    Returns their rows, their tokens, their indices among the candidates of their row, and the shape of a matrix that
    holds them. The ``count``-th largest of the maxima of disjoint blocks is at most the ``count``-th largest logit, and
    not much less; only logits of at least this value are candidates.
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
