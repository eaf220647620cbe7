"""What a step's hidden states are read for: the next tokens of branches, log-probabilities of prompts, and the values
of score requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch import Work
from engine.changes import Point, change
from engine.device import sent
from engine.logprobs import log_probabilities, read_prompt
from engine.models.model import Model
from engine.penalties import Ints
from engine.sampling import Coordinates, Floats, Laws, sample
from engine.sequence import GenerateSequence, ScoreSequence
from engine.speculation.draft import Draft
from engine.types import TokenLogprob

_Read = tuple[ScoreSequence, int, int]
"""A sequence, a position in it to read, and the position's row in the batch."""


class Draw(NamedTuple):
    """A token that a branch drew, its log-probability under the law that it was drawn from, and under the model's own
    if the request wants that."""

    token: int
    logprob: float
    detail: TokenLogprob | None


class Drawn(NamedTuple):
    """What one branch drew in a step."""

    sequence: GenerateSequence
    draft: Draft
    row: int
    """The batch's row of its last token."""
    draws: list[Draw]
    """The token after its last one, and then for each guess of its draft the token that would follow that."""


Sampler = Callable[[Tensor, Sequence[Point], Laws, Coordinates], tuple[Ints, Floats]]
"""Applies what requests change in the logits of their points, in place, and draws one token for each. See
``engine.sampling.sample``."""


def sample_on_host(logits: Tensor, points: Sequence[Point], laws: Laws, where: Coordinates) -> tuple[Ints, Floats]:
    """A ``Sampler`` of logits on the host."""
    change(logits, points)
    return sample(logits, laws, where)


def read_out(
    work: list[Work], hidden: Tensor, model: Model, read: Callable[[Tensor], Tensor], sampler: Sampler
) -> list[Drawn]:
    """Gives score sequences their values and prompts their log-probabilities, and draws the next token of every branch
    whose tokens are all computed now, and the one after each of its guesses.

    ``work`` is in the order of the batch, whose final hidden states are ``hidden`` ``[tokens, width]``; it is not
    committed yet. ``read``: see ``Forward``.
    """
    drawing, readings = _wanted(work, hidden, model)
    for token_ids, reads in readings.items():
        logits = model.read(_chosen(hidden, [row for _, _, row in reads]), token_ids)
        for (sequence, position, _), values in zip(reads, logits.tolist(), strict=True):
            sequence.values[position] = tuple(values)
    if not drawing:
        return []
    rows = [row for drawn in drawing for row in range(drawn.row, drawn.row + 1 + len(drawn.draft))]
    # The rows rise, so as many as there are are all of them: a decoding step's.
    chosen = hidden if len(rows) == hidden.shape[0] else _chosen(hidden, rows)
    _draw(drawing, read(chosen), sampler)
    return drawing


def _wanted(work: list[Work], hidden: Tensor, model: Model) -> tuple[list[Drawn], dict[tuple[int, ...], list[_Read]]]:
    """Branches that draw, which have drawn nothing yet, and positions to read, by the token ids whose logits they
    want."""
    drawing: list[Drawn] = []
    readings: dict[tuple[int, ...], list[_Read]] = {}
    start = 0
    for sequence, count, draft in work:
        end = sequence.computed + count
        if isinstance(sequence, GenerateSequence):
            if sequence.prompt_logprobs is not None and len(sequence.prompt_logprobs) < sequence.prompt_size:
                read_prompt(sequence, count, hidden[start : start + count], model)
            if end == len(sequence.tokens) and sequence.branch.max_tokens:
                drawing.append(Drawn(sequence, draft, start + count - 1, []))
        elif isinstance(sequence, ScoreSequence):
            for position in set(sequence.reads):
                if sequence.computed <= position < end:
                    row = start + position - sequence.computed
                    readings.setdefault(sequence.token_ids, []).append((sequence, position, row))
        start += count + len(draft)
    return drawing, readings


def _points(drawn: Drawn) -> Iterator[Point]:
    """Where a branch draws: after its last token, and after each guess."""
    sequence, draft = drawn.sequence, drawn.draft
    if draft.is_chain:
        for ahead in range(len(draft) + 1):
            yield Point(sequence, draft.tokens[:ahead], ahead)
        return
    for index in range(-1, len(draft)):
        path = draft.path(index)
        yield Point(sequence, path, len(path))


def _chosen(rows: Tensor, which: list[int]) -> Tensor:
    return rows[sent(torch.tensor(which), rows.device)]


def _draw(drawing: list[Drawn], logits: Tensor, sampler: Sampler) -> None:
    points: list[Point] = []
    asking: list[int] = []
    if any(map(_is_special, drawing)):
        points = [point for drawn in drawing for point in _points(drawn)]
        asking = [row for row, (sequence, _, _) in enumerate(points) if sequence.logprobs is not None]
    # Complete when the tokens are, which are waited for.
    raw = _chosen(logits, asking).to("cpu", non_blocking=True) if asking else None
    tokens, logprobs = sampler(logits, points, *_laws_and_noise(drawing))
    draws = list(map(Draw, tokens.tolist(), logprobs.tolist(), repeat(None)))
    if raw is not None:
        counts = [points[row].sequence.sampling.logprobs or 0 for row in asking]
        for row, detail in zip(asking, log_probabilities(raw.numpy(), tokens[asking], counts), strict=True):
            draws[row] = draws[row]._replace(detail=detail)
    start = 0
    for drawn in drawing:
        end = start + 1 + len(drawn.draft.tokens)
        drawn.draws.extend(draws[start:end])
        start = end


def _is_special(drawn: Drawn) -> bool:
    """Whether a branch wants more than to be drawn from its logits as they are."""
    sequence = drawn.sequence
    return sequence.penalties is not None or sequence.forbidden is not None or sequence.logprobs is not None


def _laws_and_noise(drawing: list[Drawn]) -> tuple[Laws, Coordinates]:
    """Of every point, branch by branch."""
    floats: list[tuple[float, float, float]] = []
    integers: list[tuple[int, int, int, int]] = []
    counts: list[int] = []
    ahead: list[int] = []
    for sequence, draft, _, _ in drawing:
        sampling, guesses = sequence.sampling, len(draft.tokens)
        floats.append((sampling.temperature, sampling.top_p, sampling.min_p))
        integers.append((sampling.top_k, sequence.seed, sequence.key, len(sequence.tokens)))
        counts.append(1 + guesses)
        ahead += range(1 + guesses) if draft.is_chain else (0, *draft.depths)
    law, noise = np.array(floats), np.array(integers, np.int64)
    if len(ahead) > len(counts):
        branches = np.repeat(np.arange(len(counts)), counts)
        law, noise = law[branches], noise[branches]
        noise[:, 3] += ahead
    temperature, top_p, min_p = law.T
    top_k, seed, key, position = noise.T
    laws = Laws(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    return laws, Coordinates(seed=seed, key=key, position=position)
