"""What a step's hidden states are read for: the next tokens of branches, log-probabilities of prompts, and the values
of score requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device import to_device
from engine.models.interface import Model
from engine.protocol.types import EngineError, TokenLogprob
from engine.runner.batch import ScheduledSequence
from engine.runner.forward_gpu import Forward
from engine.runner.logprobs import log_probabilities, read_prompt
from engine.sampling.logits_processors import LogitsRow, apply_logits_processors
from engine.sampling.penalties import Ints
from engine.sampling.sampler import NOT_FINITE, Array, Floats, sample
from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence, ScoreSequence
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors

_Read = tuple[ScoreSequence, int, int]
"""A sequence, a position in it to read, and the row of its hidden state."""


class SampledTokens(NamedTuple):
    """What one branch drew in a step."""

    sequence: GenerateSequence
    draft: Draft
    tokens: list[int]
    """The one after its last one, and then for each guess of its draft the one that would follow that."""
    logprobs: list[float]
    """Their log-probabilities under the laws that they were drawn from."""
    details: list[TokenLogprob]
    """And under the model's own, if the request wants that."""


class SampleRequest(NamedTuple):
    """A branch that draws."""

    sequence: GenerateSequence
    draft: Draft
    row: int
    """That of its last token's hidden state."""


Sampler = Callable[[Tensor, Sequence[LogitsRow], SamplingTensors[Array], NoiseKeys[Array]], tuple[Ints, Floats]]
"""Applies the logits processors in place and samples one token per row. See ``engine.sampling.sampler.sample``."""


def sample_on_cpu(
    logits: Tensor, rows: Sequence[LogitsRow], params: SamplingTensors[Array], noise_keys: NoiseKeys[Array]
) -> tuple[Ints, Floats]:
    """Sample from logits on the host; a ``Sampler``."""
    apply_logits_processors(logits, rows)
    return sample(logits, params, noise_keys)


def rows_needed(work: list[ScheduledSequence]) -> list[int] | None:
    """The rows of the batch whose final hidden states ``sample_and_score`` reads, ascending; ``None``: all."""
    if all(count == 1 for _, count, _ in work):
        return None
    rows: list[int] = []
    start = 0
    for sequence, count, draft in work:
        last = start + count - 1
        if isinstance(sequence, GenerateSequence):
            if sequence.prompt_logprobs is not None:
                return None
            if sequence.num_computed + count == len(sequence.tokens):
                rows += range(last, last + 1 + len(draft.tokens))
        elif isinstance(sequence, ScoreSequence):
            positions = (start + position - sequence.num_computed for position in sorted(set(sequence.read_positions)))
            rows += (row for row in positions if start <= row <= last)
        start = last + 1 + len(draft.tokens)
    return rows if len(rows) < start else None


def sample_and_score(
    work: list[ScheduledSequence],
    rows: list[int] | None,
    hidden: Tensor,
    model: Model,
    forward: Forward,
    sampler: Sampler,
) -> list[SampledTokens]:
    """Gives score sequences their values and prompts their log-probabilities, and draws the next token of every branch
    whose tokens are all computed now, and the one after each of its guesses.

    ``work`` is in the order of the batch; it is not committed yet. ``hidden`` ``[rows, width]`` are the final hidden
    states of its ``rows_needed``, and ``forward`` is where they come from. Raises ``EngineError`` when what is read or
    drawn from is not finite.
    """
    drawing, readings = _wanted(work, rows, hidden, model)
    for token_ids, reads in readings.items():
        logits = model.compute_logits(_chosen(hidden, [row for _, _, row in reads]), token_ids)
        for (scored, position, _), values in zip(reads, logits.tolist(), strict=True):
            if not all(map(math.isfinite, values)):
                raise EngineError(NOT_FINITE)
            scored.values[position] = tuple(values)
    if not drawing:
        return []
    counts = [1 + len(draft.tokens) for _, draft, _ in drawing]
    tokens, logprobs, details = _draw(drawing, counts, hidden, model, forward, sampler)
    drawn: list[SampledTokens] = []
    end = 0
    for (sequence, draft, _), count in zip(drawing, counts, strict=True):
        start, end = end, end + count
        some = [] if sequence.logprobs is None else list(islice(details, count))
        drawn.append(SampledTokens(sequence, draft, tokens[start:end], logprobs[start:end], some))
    return drawn


def _wanted(
    work: list[ScheduledSequence], rows: list[int] | None, hidden: Tensor, model: Model
) -> tuple[list[SampleRequest], dict[tuple[int, ...], list[_Read]]]:
    """Branches that draw, and positions to read, by the token ids whose logits they want."""
    drawing: list[SampleRequest] = []
    readings: dict[tuple[int, ...], list[_Read]] = {}
    places = range(len(hidden)) if rows is None else {row: place for place, row in enumerate(rows)}
    start = 0
    for sequence, count, draft in work:
        end = sequence.num_computed + count
        if isinstance(sequence, GenerateSequence):
            if sequence.prompt_logprobs is not None and len(sequence.prompt_logprobs) < sequence.prompt_len:
                read_prompt(sequence, count, hidden[start : start + count], model)
            if end == len(sequence.tokens) and sequence.branch.max_tokens:
                drawing.append(SampleRequest(sequence, draft, places[start + count - 1]))
        elif isinstance(sequence, ScoreSequence):
            for position in set(sequence.read_positions):
                if sequence.num_computed <= position < end:
                    row = places[start + position - sequence.num_computed]
                    readings.setdefault(sequence.token_ids, []).append((sequence, position, row))
        start += count + len(draft.tokens)
    return drawing, readings


def _logits_rows(sequence: GenerateSequence, draft: Draft) -> Iterator[LogitsRow]:
    """Yield the logits rows of a branch: after its last token, and after each draft token."""
    if draft.is_chain:
        for depth in range(len(draft) + 1):
            yield sequence.logits_row(draft.tokens[:depth], depth)
        return
    for index in range(-1, len(draft)):
        path = draft.path(index)
        yield sequence.logits_row(path, len(path))


def _chosen(rows: Tensor, which: Iterable[int]) -> Tensor:
    return rows[to_device(torch.tensor(list(which)), rows.device)]


def _draw(
    drawing: list[SampleRequest], counts: list[int], hidden: Tensor, model: Model, forward: Forward, sampler: Sampler
) -> tuple[list[int], list[float], Iterator[TokenLogprob]]:
    """Tokens and log-probabilities, ``counts`` for each branch, and the details that some of them want."""
    asking = _asking(drawing, counts)
    # No two rows are the same, so as many as there are are all of them: a decoding step's.
    whole, found = sum(counts) == hidden.shape[0], None
    changed = any(sequence.has_logits_processors for sequence, _, _ in drawing)
    if whole and not changed:
        found = forward.draw(hidden, [sequence for sequence, _, _ in drawing], counts)
    if found is not None:
        logits, tokens, logprobs = found
        raw = _chosen(logits, asking) if asking else None
    else:
        rows = [row + ahead for (_, _, row), count in zip(drawing, counts, strict=True) for ahead in range(count)]
        logits = model.compute_logits(hidden if whole else _chosen(hidden, rows))
        # Complete when the tokens are, which are waited for.
        raw = _chosen(logits, asking).to("cpu", non_blocking=True) if asking else None
        rows_changed = (
            [row for sequence, draft, _ in drawing for row in _logits_rows(sequence, draft)] if changed else []
        )
        tokens, logprobs = sampler(logits, rows_changed, *_params_and_noise_keys(drawing))
    details: list[TokenLogprob] = []
    if raw is not None:
        details = log_probabilities(raw.numpy(), tokens[list(asking)], list(asking.values()))
    return tokens.tolist(), logprobs.tolist(), iter(details)


def _asking(drawing: list[SampleRequest], counts: list[int]) -> dict[int, int]:
    """The draws whose log-probabilities are wanted, and of how many of the likeliest tokens beside."""
    asking: dict[int, int] = {}
    row = 0
    for (sequence, _, _), count in zip(drawing, counts, strict=True):
        if sequence.logprobs is not None:
            asking |= dict.fromkeys(range(row, row + count), sequence.sampling.logprobs or 0)
        row += count
    return asking


def _params_and_noise_keys(drawing: list[SampleRequest]) -> tuple[SamplingTensors[Array], NoiseKeys[Array]]:
    """Of every point, branch by branch."""
    floats: list[tuple[float, float, float]] = []
    integers: list[tuple[int, int, int, int]] = []
    counts: list[int] = []
    ahead: list[int] = []
    for sequence, draft, _ in drawing:
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
    params = SamplingTensors(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    return params, NoiseKeys(seed=seed, key=key, position=position)
