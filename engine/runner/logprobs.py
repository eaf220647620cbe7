"""Log-probabilities under the model's own distribution, of sampled tokens and of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.models.interface import Model
from engine.protocol.types import EngineError, TokenLogprob
from engine.sampling.sampler import NOT_FINITE
from engine.sampling.truncation import largest, relative_weights
from engine.scheduler.sequence import GenerateSequence

_BLOCK = 1 << 22
"""Maximum number of logits in memory at once while a prompt is read."""


def log_probabilities(
    logits: npt.NDArray[np.float32], tokens: npt.NDArray[np.int64], counts: Sequence[int]
) -> list[TokenLogprob]:
    """Return, for each row of ``logits`` ``[rows, vocab]``, those of its token and of its ``counts`` likeliest tokens.

    Raises ``EngineError`` if a row's largest logit is not finite.
    """
    top = logits.max(axis=-1)
    if not np.isfinite(top).all():
        raise EngineError(NOT_FINITE)
    weights = relative_weights(logits, top, np.ones(len(logits)))
    normaliser = top + np.log(weights.sum(axis=-1).astype(np.float64))
    chosen = logits[np.arange(len(logits)), tokens] - normaliser
    max_count = max(counts)
    best, values = largest(logits, max_count) if max_count else (np.empty((len(logits), 0), np.int64),) * 2
    ranked = zip(best.tolist(), (values - normaliser[:, None]).tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(ids[:count], theirs[:count], strict=True)))
        for token, logprob, count, (ids, theirs) in zip(tokens.tolist(), chosen.tolist(), counts, ranked, strict=True)
    ]


def read_prompt(sequence: GenerateSequence, count: int, hidden: Tensor, model: Model) -> None:
    """Append the log-probabilities of a prompt's tokens that this step's ``count`` tokens of the sequence predict.

    ``hidden``: ``[count, width]``. After a preemption the step may repeat positions that were read before.
    """
    logprobs = sequence.prompt_logprobs
    if logprobs is None:
        return
    rows = max(1, _BLOCK // model.config.vocab_size)
    end = min(sequence.num_computed + count, sequence.prompt_len - 1)
    for start in range(len(logprobs) - 1, end, rows):
        stop = min(start + rows, end)
        logits = (
            model.compute_logits(hidden[start - sequence.num_computed : stop - sequence.num_computed]).cpu().numpy()
        )
        tokens = np.array(sequence.tokens[start + 1 : stop + 1], np.int64)
        logprobs.extend(log_probabilities(logits, tokens, [sequence.sampling.prompt_logprobs or 0] * len(tokens)))
