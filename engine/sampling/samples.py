"""Sampled tokens of a step, known at once on a CPU and on their way from a GPU."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.device import to_host
from engine.sampling.sampler import Floats, Ints


class Samples(Protocol):
    """Sampled tokens and their log-probabilities, one of each for each row of logits."""

    @property
    def tokens_gpu(self) -> Tensor | None:
        """The tokens ``[rows]`` on a GPU, where a later step takes them before the host reads them; else ``None``."""
        ...

    def read(self) -> tuple[Ints, Floats]:
        """Return both on the host; tokens are -1 where logits are not finite.

        A GPU must have reached an event after the step.
        """
        ...


class HostSamples:
    """``Samples`` that a CPU has computed."""

    tokens_gpu = None

    def __init__(self, tokens: Ints, logprobs: Floats) -> None:
        self._values = tokens, logprobs

    def read(self) -> tuple[Ints, Floats]:
        return self._values


class DeviceSamples:
    """``Samples`` that a GPU computes. The copy to the host is launched at once, in the order of the stream."""

    def __init__(self, samples: Tensor) -> None:
        """``samples``: int64 ``[2, rows]``, tokens and the bits of their float64 log-probabilities, on the device.

        They may change once the next step is launched.
        """
        self.tokens_gpu = samples[0]
        self._host = to_host(samples)

    def read(self) -> tuple[Ints, Floats]:
        tokens, logprobs = self._host.numpy()
        return tokens, logprobs.view("float64")
