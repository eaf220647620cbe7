"""Which tokens top-k, top-p and min-p keep (those whose logit reaches a row's smallest kept one), and the likeliest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]

_FIRST = 64
"""A nucleus is looked for among this many of the likeliest tokens before all are sorted."""
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


def smallest_kept(x: Logits, top: Logits, temperature: Floats, top_k: int, top_p: float, min_p: float) -> Logits:
    """The smallest logit that each row keeps, ``[rows]``.

    ``x``: ``[rows, vocab]``; ``top``: the largest logits, ``[rows]``; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    """
    smallest: Logits = np.full(len(x), -np.inf, np.float32)
    if top_k or top_p < 1:
        smallest = _nucleus(x, top, temperature, top_k, top_p)
    if min_p > 0:
        floor = top + temperature * np.log(min_p)
        rounded = floor.astype(np.float32)
        rounded = np.where(rounded < floor, np.nextafter(rounded, np.float32(np.inf)), rounded)
        smallest = np.maximum(smallest, np.minimum(rounded, top))
    return smallest


def _nucleus(x: Logits, top: Logits, temperature: Floats, top_k: int, top_p: float) -> Logits:
    """The last logit of the ``top_k`` largest (0: of all) that top-p keeps."""
    best = _largest(x, top_k or min(_FIRST, x.shape[1]))
    if top_p >= 1:
        return best[:, -1]
    total: Floats | None = None
    if not top_k:
        total = relative_weights(x, top, temperature).sum(axis=-1).astype(np.float64)
    last, complete = _last_kept(best, top, temperature, top_p, total)
    if total is not None and best.shape[1] < x.shape[1]:
        wide = np.flatnonzero(~complete)
        if len(wide):
            everything = np.sort(x[wide], axis=-1)[:, ::-1]
            last[wide], _ = _last_kept(everything, top[wide], temperature[wide], top_p, total[wide])
    return last


def _last_kept(
    best: Logits, top: Logits, temperature: Floats, top_p: float, total: Floats | None
) -> tuple[Logits, npt.NDArray[np.bool_]]:
    """The last of the descending logits ``best`` before which less than ``top_p`` of ``total`` lies (by default of the
    mass of ``best``), and whether it is sure that no later one would belong to them."""
    weights = np.exp((best.astype(np.float64) - top[:, None].astype(np.float64)) / temperature[:, None])
    mass = weights.cumsum(axis=-1)
    if total is None:
        total = mass[:, -1]
    kept = 1 + (mass[:, :-1] < top_p * total[:, None]).sum(axis=-1)
    return best[np.arange(len(best)), kept - 1], mass[:, -1] >= top_p * total


def largest(x: Logits, count: int) -> tuple[Ints, Logits]:
    """The ``count`` tokens with the largest logits of each row and these, descending; of equal ones the smaller ids."""
    row, column, place, shape = _within_reach(x, count)
    tokens = np.zeros(shape, np.int64)
    tokens[row, place] = column
    logits = np.full(shape, -np.inf, np.float32)
    logits[row, place] = x[row, column]
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    return np.take_along_axis(tokens, order, axis=-1), np.take_along_axis(logits, order, axis=-1)


def _largest(x: Logits, count: int) -> Logits:
    """The ``count`` largest logits of each row, descending."""
    if 4 * count > x.shape[1]:
        return np.sort(x, axis=-1)[:, ::-1][:, :count]
    row, column, place, shape = _within_reach(x, count)
    logits = np.full(shape, -np.inf, np.float32)
    logits[row, place] = x[row, column]
    logits.sort(axis=-1)
    return logits[:, ::-1][:, :count]


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
