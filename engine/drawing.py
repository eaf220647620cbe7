"""What a step's hidden states are read for: the next tokens of branches, log-probabilities of prompts, and the values
of score requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.batch import Work
from engine.logprobs import log_probabilities, read_prompt
from engine.models.model import Model
from engine.penalties import forbid, penalise
from engine.sampling import Coordinates, Laws, sample
from engine.sequence import GenerateSequence, ScoreSequence
from engine.types import TokenLogprob

_Read = tuple[ScoreSequence, int, int]
"""A sequence, a position in it to read, and the position's row in the batch."""


class Draw(NamedTuple):
    """The token that a branch drew, its log-probability under the law that it was drawn from, and under the model's
    own if the request wants that."""

    sequence: GenerateSequence
    token: int
    logprob: float
    detail: TokenLogprob | None


def read_out(work: list[Work], hidden: Tensor, model: Model) -> list[Draw]:
    """Gives score sequences their values and prompts their log-probabilities, and draws a token for every branch whose
    tokens are all computed now.

    ``work`` is in the order of the batch, whose final hidden states are ``hidden`` ``[tokens, width]``; it is not
    committed yet.
    """
    drawing, rows, readings = _wanted(work, hidden, model)
    for token_ids, reads in readings.items():
        logits = model.read(hidden[[row for _, _, row in reads]], token_ids)
        for (sequence, position, _), values in zip(reads, logits.tolist(), strict=True):
            sequence.values[position] = tuple(values)
    return _draw(drawing, model.read(hidden[rows])) if rows else []


def _wanted(
    work: list[Work], hidden: Tensor, model: Model
) -> tuple[list[GenerateSequence], list[int], dict[tuple[int, ...], list[_Read]]]:
    """Branches whose next token is drawn, with their rows in the batch, and positions to read, by the token ids whose
    logits they want."""
    drawing: list[GenerateSequence] = []
    rows: list[int] = []
    readings: dict[tuple[int, ...], list[_Read]] = {}
    start = 0
    for sequence, count in work:
        end = sequence.computed + count
        if isinstance(sequence, GenerateSequence):
            if sequence.prompt_logprobs is not None and len(sequence.prompt_logprobs) < sequence.prompt_size:
                read_prompt(sequence, count, hidden[start : start + count], model)
            if end == len(sequence.tokens) and sequence.branch.max_tokens:
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
    asking = [row for row, sequence in enumerate(sequences) if sequence.logprobs is not None]
    raw = logits.numpy()[asking] if asking else None
    _change(sequences, logits)
    floats = np.array([(s.sampling.temperature, s.sampling.top_p, s.sampling.min_p) for s in sequences])
    ints = np.array([(s.sampling.top_k, s.seed, s.key, len(s.tokens)) for s in sequences], np.int64)
    temperature, top_p, min_p = floats.T
    top_k, seed, key, position = ints.T
    laws = Laws(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    tokens, logprobs = sample(logits, laws, Coordinates(seed=seed, key=key, position=position))
    details: list[TokenLogprob | None] = [None] * len(sequences)
    if raw is not None:
        counts = [sequences[row].sampling.logprobs or 0 for row in asking]
        for row, detail in zip(asking, log_probabilities(raw, tokens[asking], counts), strict=True):
            details[row] = detail
    return list(map(Draw, sequences, tokens.tolist(), logprobs.tolist(), details))


def _change(sequences: list[GenerateSequence], logits: Tensor) -> None:
    """Applies, in place, what requests change in their branches' logits."""
    changed = [row for row, sequence in enumerate(sequences) if sequence.penalties is not None]
    if changed:
        penalise(logits.numpy(), changed, [one for row in changed if (one := sequences[row].penalties) is not None])
    short = {
        row: sequence.forbidden
        for row, sequence in enumerate(sequences)
        if sequence.forbidden is not None and len(sequence.written) < sequence.sampling.min_tokens
    }
    if short:
        forbid(logits.numpy(), list(short), list(short.values()))
