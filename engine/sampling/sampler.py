"""Sampling the next token of every row of a batch, exactly and independently of the other rows.

A row's sampling distribution is made from its logits in this order: temperature, then top-k, then top-p of the tokens
that top-k kept, then min-p (the order of transformers' logits warpers). Tokens that tie with the last one kept are kept
too, so that the distribution does not depend on the order of equal logits.

The sample is ``argmax((logit - top) / temperature + Gumbel noise)`` in float64 over the tokens kept (the Gumbel-max
trick), which has exactly that distribution. The noise of a token is a function of its id, so it is computed only for
tokens that can be the argmax.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.protocol.types import EngineError
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors
from kernels.cpu.sampling import sampler

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Floats32 = npt.NDArray[np.float32]


def sample(logits: Tensor, params: SamplingTensors[Array], noise_keys: NoiseKeys[Array]) -> tuple[Ints, Floats]:
    """Sample one token per row.

    ``logits``: float32 ``[rows, vocab]``. Returns token ids and their log-probabilities under the distribution that
    they were sampled from, ``[rows]`` each; a greedy token's is that of temperature 1, as its own distribution has only
    one outcome. They do not depend, bit for bit, on the other rows. Raises ``LogitsNotFinite`` if a row's largest logit
    is not finite or any is NaN.
    """
    tokens, logprobs = sampler.sample(logits, params, noise_keys)
    require_finite_logits(tokens.min() >= 0)
    return tokens, logprobs


class LogitsNotFinite(EngineError):
    """The logits of a sequence are not finite, perhaps because its keys and values are not."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not finite")


def require_finite_logits(is_finite: bool | np.bool_) -> None:
    """Raise ``LogitsNotFinite`` unless ``is_finite``. The samplers of ``kernels`` return token -1 if logits are not."""
    if not is_finite:
        raise LogitsNotFinite
