"""Log-probabilities under the model's own distribution, of sampled tokens and of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.device import to_device
from engine.models.interface import Model
from engine.protocol.types import TokenLogprob
from engine.sampling.sampler import Floats32, Ints, require_finite_logits
from engine.scheduler.sequence import GenerateSequence

_MAX_LOGITS = 1 << 22
"""Maximum number of logits in memory at once while a prompt is read."""
_MAX_BLOCK_TOKENS = 64
"""Maximum number of tokens of a block whose maximum is taken in the search for a row's largest logits."""


def log_probabilities(logits: Floats32, tokens: Ints, counts: Sequence[int]) -> list[TokenLogprob]:
    """Return, for each row of ``logits`` ``[rows, vocab]``, those of its token and of its ``counts`` likeliest tokens.

    Raises ``EngineError`` if a row's largest logit is not finite.
    """
    normaliser = _log_normalisers(logits)
    require_finite_logits(np.isfinite(normaliser).all())
    chosen = logits[np.arange(len(logits)), tokens] - normaliser
    best, values = largest(logits, max(counts))
    ranked = zip(best.tolist(), (values - normaliser[:, None]).tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(ids[:count], theirs[:count], strict=True)))
        for token, logprob, count, (ids, theirs) in zip(tokens.tolist(), chosen.tolist(), counts, ranked, strict=True)
    ]


def _log_normalisers(logits: Floats32) -> npt.NDArray[np.float64]:
    """Return the logarithm of the sum of the exponentials of each row; of rows that are not finite, no number."""
    top = logits.max(axis=-1)
    top[~np.isfinite(top)] = np.nan
    weights = logits - top[:, None]
    np.exp(weights, out=weights)
    normalisers: npt.NDArray[np.float64] = top + np.log(weights.sum(axis=-1).astype(np.float64))
    return normalisers


def compute_logprobs(logits: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Return log-probabilities ``[rows, len(token_ids)]`` of some tokens, float64, from ``logits`` ``[rows, vocab]``.

    On the CPU a row's result does not depend on the other rows.
    """
    if logits.device.type == "cpu":  # torch would split the sum of a single row in two
        normaliser = torch.from_numpy(_log_normalisers(logits.numpy()))[:, None]
    else:
        normaliser = torch.logsumexp(logits.double(), dim=-1, keepdim=True)
    chosen = logits[:, to_device(torch.tensor(token_ids), logits.device)]
    return chosen.double() - normaliser


def largest(logits: Floats32, count: int) -> tuple[Ints, Floats32]:
    """Return the ``count`` tokens with the largest logits of each row and these logits, descending.

    Both ``[rows, count]``; of equal logits the smaller token ids are taken.
    """
    rows, vocab = logits.shape
    tokens = np.empty((rows, count), np.int64)
    if count:
        # The count-th largest of the maxima of disjoint blocks is at most the count-th largest logit, and not much
        # less: only logits of at least this bound are candidates.
        depth = max(1, min(_MAX_BLOCK_TOKENS, vocab // (2 * count)))
        blocks = vocab // depth
        maxima = logits[:, : depth * blocks].reshape(rows, depth, blocks).max(axis=1)
        bounds = np.partition(maxima, blocks - count, axis=-1)[:, blocks - count]
        for row, bound, best in zip(logits, bounds, tokens, strict=True):
            candidates = np.flatnonzero(row >= bound)
            best[:] = candidates[np.argsort(-row[candidates], kind="stable")[:count]]
    return tokens, np.take_along_axis(logits, tokens, axis=-1)


def read_prompt(sequence: GenerateSequence, count: int, hidden: Tensor, model: Model) -> None:
    """Append the log-probabilities of a prompt's tokens that this step's ``count`` tokens of the sequence predict.

    ``hidden``: ``[count, width]``. After a preemption the step may repeat positions that were read before.
    """
    logprobs, offset = sequence.prompt_logprobs, sequence.num_computed
    if logprobs is None:
        return
    rows = max(1, _MAX_LOGITS // model.config.vocab_size)
    end = min(offset + count, sequence.prompt_len - 1)
    for start in range(len(logprobs) - 1, end, rows):
        stop = min(start + rows, end)
        logits = model.compute_logits(hidden[start - offset : stop - offset]).cpu().numpy()
        tokens = np.array(sequence.tokens[start + 1 : stop + 1], np.int64)
        logprobs.extend(log_probabilities(logits, tokens, [sequence.sampling.prompt_logprobs or 0] * len(tokens)))
