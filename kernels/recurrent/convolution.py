"""Short causal convolutions, one filter for each channel, over the tokens of a step and those before them.

The state of a sequence is its last ``width - 1`` inputs, ``[width - 1, channels]``, the latest last. States and weights
are float32; the inputs of tokens, and with them the results, may be 16-bit on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.availability import can_use_kernels
from kernels.cpu.recurrent import convolution as on_cpu


def causal_convolution(
    x: Tensor, weight: Tensor, states: Tensor, segments: Tensor, *, activate: bool, bias: Tensor | None = None
) -> Tensor:
    """Return the convolution of a step's inputs, and write the states after them.

    ``x``: ``[tokens, channels]``. ``weight``: ``[width, channels]``, the filters of all channels, that of the token
    itself last. ``states``: ``[slots, width - 1, channels]``. ``segments``: ``[segments, 5]`` int64, those of
    ``engine.cache.state_layers.StateSegment``, in their order; those without tokens are skipped.
    ``activate``: apply SiLU to the result. ``bias``: ``[channels]``.
    """
    if x.is_cuda:
        from kernels.triton.recurrent import convolution as on_gpu

        return on_gpu.causal_convolution(x, weight, states, segments, bias, activate=activate)
    if can_use_kernels(x, weight, states):
        return on_cpu.causal_convolution(x, weight, states, segments, bias, activate=activate)
    wide, before = x.to(states.dtype), len(weight) - 1
    out = torch.empty_like(wide)
    for start, end, source, target, _ in segments[segments[:, 0] < segments[:, 1]].tolist():
        history = states[source] if source >= 0 else torch.zeros_like(states[target])
        inputs = torch.cat((history, wide[start:end]))
        windows = inputs.unfold(0, before + 1, 1)  # [tokens, channels, width]
        out[start:end] = (windows * weight.T).sum(-1)
        states[target] = inputs[len(inputs) - before :]
    if bias is not None:
        out += bias
    return (F.silu(out) if activate else out).to(x.dtype)
