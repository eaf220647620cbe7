"""Sampling compared with the usual torch code: sort, truncate, sample."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.measure import Case, Run, Runs
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors
from kernels.sampling.sampling import sample

_TEMPERATURE = 0.8
_KINDS = {
    "temperature": (0, 1.0, 0.0),
    "top-k": (50, 1.0, 0.0),
    "top-p": (0, 0.9, 0.0),
    "top-k, top-p, min-p": (50, 0.9, 0.02),
}


def cases(rows: tuple[int, ...] = (1, 16, 128), vocab: int = 128_256) -> Iterator[Case]:
    """Yield all kinds of sampling parameters for some numbers of rows. The logits have to be read once."""
    for name, (top_k, top_p, min_p) in _KINDS.items():
        for count in rows:
            yield Case(
                f"draw with {name}, {count} × {vocab}",
                4 * count * vocab,
                partial(_runs, rows=count, vocab=vocab, top_k=top_k, top_p=top_p, min_p=min_p),
            )


def _runs(device: torch.device, rows: int, vocab: int, top_k: int, top_p: float, min_p: float) -> Runs:
    logits = torch.randn(rows, vocab, device=device) * 3
    temperature, nucleus, least = (torch.full((rows,), x, dtype=torch.float64) for x in (_TEMPERATURE, top_p, min_p))
    law = SamplingTensors(temperature, nucleus, least, torch.full((rows,), top_k))
    where = NoiseKeys(torch.arange(rows), torch.arange(rows) + 10, torch.arange(rows) + 100)
    law_there, where_there = SamplingTensors(*(x.to(device) for x in law)), NoiseKeys(*(x.to(device) for x in where))

    def drawn() -> Tensor:
        return sample(logits, law_there, where_there)[0]

    # The peer has noise of its own and samples other tokens.
    peers: dict[str, Run] = {"torch": lambda: _sorting(logits, top_k, top_p, min_p)}
    return Runs(drawn, peers, lambda: sample(logits.cpu(), law, where)[0].to(device), 0.0, alike=False)


def _sorting(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    values, tokens = (logits / _TEMPERATURE).sort(dim=-1, descending=True)
    chances = values.softmax(dim=-1)
    if top_k:
        chances[:, top_k:] = 0
    if top_p < 1:
        chances = chances / chances.sum(dim=-1, keepdim=True)
        chances = torch.where(chances.cumsum(dim=-1) - chances < top_p, chances, 0)
    if min_p:
        chances = torch.where(chances >= min_p * chances[:, :1], chances, 0)
    # An exponential race, without the wait for the host of torch.multinomial.
    winner = (chances / torch.empty_like(chances).exponential_()).argmax(dim=-1, keepdim=True)
    return tokens.gather(1, winner).squeeze(1)
