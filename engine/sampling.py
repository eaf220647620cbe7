"""Drawing the next token of every row of a batch, exactly and independently of the other rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.noise import SAMPLE, gumbel_noise

_FIRST_CANDIDATES = 64
"""A nucleus is looked for among this many of the likeliest tokens before more are sorted."""


@dataclass(frozen=True, slots=True)
class Laws:
    """The sampling parameters of a batch, each ``[rows]``. ``temperature`` 0 is greedy."""

    temperature: Tensor
    """float64."""
    top_p: Tensor
    """float64; 1 is off."""
    min_p: Tensor
    """float64; 0 is off."""
    top_k: Tensor
    """int64; 0 is off."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where the noise of each row comes from, each int64 ``[rows]``. ``position`` is the token's place in its
    sequence."""

    seed: Tensor
    key: Tensor
    position: Tensor


def sample(logits: Tensor, laws: Laws, where: Coordinates) -> tuple[Tensor, Tensor]:
    """Draws one token per row.

    ``logits``: ``[rows, vocab]``. Returns token ids (int64 ``[rows]``) and their log-probabilities under the law that
    they were drawn from (float64 ``[rows]``); a greedy token's is that of temperature 1, as its own law has only one
    outcome.

    The draw is ``argmax(log p + Gumbel noise)`` in float64, which has exactly the law ``p`` and needs no normalised
    ``p``.
    """
    scores = filtered_logits(logits, laws)
    random = laws.temperature > 0
    if bool(random.any()):
        noise = gumbel_noise(where.seed, where.key, where.position, SAMPLE, logits.shape[1])
        noisy = scores + noise if bool(random.all()) else torch.where(random[:, None], scores + noise, scores)
        tokens = noisy.argmax(dim=-1)
    else:
        tokens = scores.argmax(dim=-1)
    chosen = scores.gather(1, tokens[:, None]).squeeze(1)
    return tokens, chosen - scores.logsumexp(dim=-1)


def filtered_logits(logits: Tensor, laws: Laws) -> Tensor:
    """The law of each row as unnormalised log-probabilities, float64 ``[rows, vocab]``, -inf for what is filtered out.

    Temperature comes first, then top-k, then top-p of what top-k left, then min-p. Tokens that tie with the last one
    kept are kept too, so that the law does not depend on the order of equal logits.
    """
    greedy = laws.temperature == 0
    scores = logits.to(torch.float64) / torch.where(greedy, 1.0, laws.temperature)[:, None]
    rows = torch.nonzero(~greedy & ((laws.top_k > 0) | (laws.top_p < 1) | (laws.min_p > 0))).squeeze(1)
    if len(rows) == 0:
        return scores
    part = scores[rows]
    smallest = _smallest_kept(part, laws.top_k[rows], laws.top_p[rows], laws.min_p[rows])
    scores[rows] = part.masked_fill_(part < smallest[:, None], -torch.inf)
    return scores


def _smallest_kept(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest score that each row keeps, ``[rows]``."""
    vocab = scores.shape[1]
    smallest = scores.amax(dim=-1) + min_p.log()
    limit = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    if not bool(((limit < vocab) | (top_p < 1)).any()):
        return smallest
    largest_k = int(torch.where(limit < vocab, limit, 0).max())
    count = min(vocab, max(_FIRST_CANDIDATES, largest_k))
    while True:
        best = scores.topk(count, dim=-1).values
        kept = torch.arange(count) < limit[:, None]
        # A row without top-k is normalised by the whole vocabulary, of which only the best are sorted.
        inside = best.masked_fill(~kept, -torch.inf).logsumexp(dim=-1)
        total = torch.where(limit < vocab, inside, scores.logsumexp(dim=-1))
        mass = (best - total[:, None]).exp().masked_fill_(~kept, 0.0)
        before = mass.cumsum(dim=-1) - mass
        kept &= (before < top_p[:, None]) | (top_p[:, None] >= 1)
        counts = kept.sum(dim=-1)
        undecided = (counts == count) & (limit == vocab) & (top_p < 1)
        if count == vocab or not bool(undecided.any()):
            break
        count = min(vocab, count * 8)
    last = best.gather(1, (counts - 1)[:, None]).squeeze(1)
    open_ended = (limit == vocab) & (top_p >= 1)
    return torch.maximum(smallest, torch.where(open_ended, -math.inf, last))
