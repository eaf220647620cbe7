"""Drawing the next token of every row of a batch, exactly and independently of the other rows.

A row's law is made from its logits in this order: temperature, then top-k, then top-p of what top-k left, then min-p
(the order of transformers' logits warpers). Tokens that tie with the last one kept are kept too, so that the law does
not depend on the order of equal logits.

The draw is ``argmax((logit - top) / temperature + Gumbel noise)`` in float64 over the law's tokens, which has exactly
that law. The noise of a token is a function of its id, so it is only computed for tokens that can win.

Where numba is installed ``kernels.cpu.sampling.sampler`` does all of this. What follows here is its reference in NumPy,
which draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.protocol.types import EngineError
from engine.sampling.truncation import relative_weights, smallest_kept
from kernels.common.noise import SAMPLE, RaceBits, Words, gumbel_noise, noise_streams

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]

NOT_FINITE = "the model's logits are not finite"
_CHUNK = 1 << 15
"""Logits handled at once: what they need stays in a core's second-level cache."""
_RACE = 24.0
"""Candidates per row of a race, about; exp(-24) is the chance that all tokens must run it."""
_ROUNDING = 1e-3
"""More than the relative error of a float32 weight that matters (see ``_likely_winners``)."""


@dataclass(frozen=True, slots=True)
class Laws:
    """The sampling parameters of a batch, each ``[rows]``. ``temperature`` 0 is greedy."""

    temperature: Floats
    top_p: Floats
    """1 is off."""
    min_p: Floats
    """0 is off."""
    top_k: Ints
    """0 is off."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where the noise of each row comes from, each ``[rows]``. ``position`` is the token's place in its sequence."""

    seed: Ints
    key: Ints
    position: Ints


def sample(logits: Tensor, laws: Laws, where: Coordinates) -> tuple[Ints, Floats]:
    """Draws one token per row.

    ``logits``: float32 ``[rows, vocab]``. Returns token ids and their log-probabilities under the law that they were
    drawn from, ``[rows]`` each; a greedy token's is that of temperature 1, as its own law has only one outcome. They
    are the same bits whatever the other rows are. Raises ``EngineError`` when a row's largest logit is not finite.
    """
    from kernels.cpu.sampling.sampler import draw

    return checked(*draw(logits, laws, where))


def checked(tokens: Ints, logprobs: Floats) -> tuple[Ints, Floats]:
    """What ``kernels.cpu.sampling.sampler`` drew. Raises ``EngineError`` when it could not."""
    if tokens.min() < 0:
        raise EngineError(NOT_FINITE)
    return tokens, logprobs


def sample_with_numpy(logits: Tensor, laws: Laws, where: Coordinates) -> tuple[Ints, Floats]:
    """``sample`` without numba. Which tokens can win is found in float32, with room for its rounding
    (``_likely_winners``)."""
    values: Logits = logits.numpy()
    rows, vocab = values.shape
    tokens, logprobs = np.empty(rows, np.int64), np.empty(rows)
    fields: list[_Field] = []
    streams = noise_streams(where.seed, where.key, where.position, SAMPLE)
    bits: RaceBits | None = None
    with np.errstate(over="ignore", under="ignore"):
        for law, chosen in _by_law(laws, vocab).items():
            for part in _chunks(chosen, vocab):
                x, temperature = _rows(values, part), laws.temperature[part]
                if law is None:
                    tokens[part], logprobs[part] = _greedy(x)
                elif law == _UNFILTERED:
                    bits = bits or RaceBits(max(1, _CHUNK // vocab), vocab)
                    fields.append(_likely_winners(x, part, temperature, bits.below(streams[part])))
                else:
                    fields.append(_supported(x, part, temperature, law))
        if fields:
            part = [row for field in fields for row in field.rows]
            tokens[part], logprobs[part] = _run(values, laws.temperature, streams, fields)
    return tokens, logprobs


_Filters = tuple[int, float, float]
_UNFILTERED: _Filters = (0, 1.0, 0.0)


def _by_law(laws: Laws, vocab: int) -> dict[_Filters | None, list[int]]:
    """Rows by their filters (top-k, top-p, min-p); greedy rows, which no filter changes, under ``None``."""
    groups: dict[_Filters | None, list[int]] = {}
    columns = (laws.temperature, laws.top_k, laws.top_p, laws.min_p)
    for row, (temperature, top_k, top_p, min_p) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        filters = (top_k if top_k < vocab else 0, top_p, min_p)
        groups.setdefault(filters if temperature > 0 else None, []).append(row)
    return groups


def _chunks(rows: list[int], vocab: int) -> Iterator[list[int]]:
    size = max(1, _CHUNK // vocab)
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _rows(values: Logits, rows: list[int]) -> Logits:
    """Some rows, as a view where they are neighbours."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return values[rows[0] : rows[-1] + 1]
    return values[rows]


def _tops(x: Logits) -> Logits:
    top: Logits = x.max(axis=-1)
    if not np.isfinite(top).all():
        raise EngineError(NOT_FINITE)
    return top


def _greedy(x: Logits) -> tuple[Ints, Floats]:
    top = _tops(x)
    weights = relative_weights(x, top, np.ones(len(x)))
    return x.argmax(axis=-1), -np.log(weights.sum(axis=-1).astype(np.float64))


class _Field(NamedTuple):
    """The tokens that some rows draw from."""

    rows: list[int]
    counts: Ints
    """Tokens of each row, at least 1."""
    tokens: Ints
    """Row by row."""
    top: Logits
    """Each row's largest logit."""
    total: Floats | None
    """Each row's sum of ``exp((logit - top) / temperature)``; ``None``: that of its tokens here."""
    limit: Floats
    """A winner that arrives later than this may not be the winner among all tokens."""


def _likely_winners(x: Logits, rows: list[int], temperature: Floats, bits: Logits) -> _Field:
    """The front of an exponential race among all tokens.

    With weights ``w`` (1 for the likeliest token) and uniforms ``u``, the winner has the smallest time
    ``-log(u) / w``. The winning time is exponential with rate ``sum(w)``, and ``-log(u) >= 1 - u``, so tokens with
    ``1 - u <= limit * w`` for ``limit = 24 / sum(w)`` are about 24 and contain everybody that arrives before the limit.

    The comparison is made in float32 (``bits`` are those of ``RaceBits``). A token that can be concerned has
    ``w > 2**-53 / limit``, so the exponent of its weight, three roundings relative to at most about 50, is off by less
    than 1e-5.
    """
    top = _tops(x)
    weights = relative_weights(x, top, temperature)
    total = weights.sum(axis=-1).astype(np.float64)
    limit = _RACE / total
    weights *= (limit * (1 + _ROUNDING) * 2.0**32).astype(np.float32)[:, None]
    weights += 4
    candidates = bits <= weights
    candidates[:, 0] = True  # no row is without a candidate
    return _Field(rows, *_flat(candidates), top, total, limit)


def _supported(x: Logits, rows: list[int], temperature: Floats, law: _Filters) -> _Field:
    top = _tops(x)
    kept = x >= smallest_kept(x, top, temperature, *law)[:, None]
    return _Field(rows, *_flat(kept), top, None, np.full(len(rows), np.inf))


def _flat(mask: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """How many columns each row of a mask has, and the columns row by row."""
    rows, columns = np.divmod(np.flatnonzero(mask), mask.shape[1])
    return np.bincount(rows, minlength=len(mask)), columns


def _run(values: Logits, temperature: Floats, streams: Words, fields: list[_Field]) -> tuple[Ints, Floats]:
    """The winners of all rows of the fields, and their log-probabilities."""
    rows = np.array([row for field in fields for row in field.rows])
    counts = np.concatenate([field.counts for field in fields])
    tokens = np.concatenate([field.tokens for field in fields])
    top = np.concatenate([field.top for field in fields]).astype(np.float64)
    row, place = np.repeat(rows, counts), np.repeat(np.arange(len(rows)), counts)
    starts = counts.cumsum() - counts
    scores = (values[row, tokens].astype(np.float64) - top[place]) / temperature[row]
    noisy = scores + gumbel_noise(streams[row], tokens)
    best = np.maximum.reduceat(noisy, starts)
    hits = np.flatnonzero(noisy == best[place])
    first = hits[np.searchsorted(place[hits], np.arange(len(rows)))]
    winners, won = tokens[first], scores[first]
    sums = np.add.reduceat(np.exp(scores), starts)
    total = np.concatenate(
        [sums[start:end] if field.total is None else field.total for field, start, end in _spans(fields)]
    )
    limit = np.concatenate([field.limit for field in fields])
    for index in np.flatnonzero(np.exp(-best) > limit).tolist():
        every = np.arange(values.shape[1])
        scores = (values[rows[index]].astype(np.float64) - top[index]) / temperature[rows[index]]
        winners[index] = (scores + gumbel_noise(streams[rows[index]], every)).argmax()
        won[index] = scores[winners[index]]
    return winners, won - np.log(total)


def _spans(fields: list[_Field]) -> Iterator[tuple[_Field, int, int]]:
    """Each field with the places of its first row and of the one after its last among all rows."""
    start = 0
    for field in fields:
        yield field, start, start + len(field.rows)
        start += len(field.rows)
