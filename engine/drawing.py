"""What a step's hidden states are read for: the next tokens of branches, and the values of score requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch import Work
from engine.models.model import Model
from engine.sampling import Coordinates, Laws, sample
from engine.sequence import GenerateSequence, ScoreSequence

_Read = tuple[ScoreSequence, int, int]
"""A sequence, a position in it to read, and the position's row in the batch."""


class Draw(NamedTuple):
    """The token that a branch drew, and its log-probability under the law that it was drawn from."""

    sequence: GenerateSequence
    token: int
    logprob: float


def read_out(work: list[Work], hidden: Tensor, model: Model) -> list[Draw]:
    """Gives score sequences their values and draws a token for every branch whose tokens are all computed now.

    ``work`` is in the order of the batch, whose final hidden states are ``hidden`` ``[tokens, width]``; it is not
    committed yet.
    """
    drawing, rows, readings = _wanted(work)
    for token_ids, reads in readings.items():
        logits = model.read(hidden[[row for _, _, row in reads]], token_ids)
        for (sequence, position, _), values in zip(reads, logits.tolist(), strict=True):
            sequence.values[position] = tuple(values)
    return _draw(drawing, model.read(hidden[rows])) if rows else []


def _wanted(work: list[Work]) -> tuple[list[GenerateSequence], list[int], dict[tuple[int, ...], list[_Read]]]:
    """Who needs logits: branches whose next token is drawn, with their rows in the batch, and positions to read, by the
    token ids whose logits they want."""
    drawing: list[GenerateSequence] = []
    rows: list[int] = []
    readings: dict[tuple[int, ...], list[_Read]] = {}
    start = 0
    for sequence, count in work:
        end = sequence.computed + count
        if isinstance(sequence, GenerateSequence):
            if end == len(sequence.tokens):
                drawing.append(sequence)
                rows.append(start + count - 1)
        elif isinstance(sequence, ScoreSequence):
            for position in set(sequence.reads):
                if sequence.computed <= position < end:
                    row = start + position - sequence.computed
                    readings.setdefault(sequence.token_ids, []).append((sequence, position, row))
        start += count
    return drawing, rows, readings


def _draw(sequences: list[GenerateSequence], logits: Tensor) -> list[Draw]:
    floats = np.array([(s.sampling.temperature, s.sampling.top_p, s.sampling.min_p) for s in sequences])
    ints = np.array([(s.sampling.top_k, s.seed, s.key, len(s.tokens)) for s in sequences], np.int64)
    temperature, top_p, min_p = torch.from_numpy(floats.T.copy())
    top_k, seed, key, position = torch.from_numpy(ints.T.copy())
    laws = Laws(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    tokens, logprobs = sample(logits, laws, Coordinates(seed=seed, key=key, position=position))
    return list(map(Draw, sequences, tokens.tolist(), logprobs.tolist()))
