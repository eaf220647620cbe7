"""The sampling parameters and the noise keys of the rows of a batch, as the samplers of all devices take them."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import numpy.typing as npt
from torch import Tensor

ArrayT = TypeVar("ArrayT", Tensor, npt.NDArray[Any])


class SamplingTensors(NamedTuple, Generic[ArrayT]):
    """Sampling parameters, ``[rows]`` each: tensors for a sampler on a device, NumPy arrays for the one on the CPU."""

    temperature: ArrayT
    """float64; 0 is greedy."""
    top_p: ArrayT
    """float64; 1 is off."""
    min_p: ArrayT
    """float64; 0 is off."""
    top_k: ArrayT
    """int64; 0 is off."""


class NoiseKeys(NamedTuple, Generic[ArrayT]):
    """Keys of the noise that a row is sampled with (``kernels.common.noise``), int64 ``[rows]`` each."""

    seed: ArrayT
    key: ArrayT
    position: ArrayT
    """Index in its sequence of the token that is sampled."""
