"""The results of a step's hidden states: sampled tokens, log-probabilities of prompts, and scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device import to_device
from engine.models.interface import Model
from engine.protocol.types import TokenLogprob
from engine.runner.batch import ScheduledSequence
from engine.runner.fused_sampler_cpu import FusedCpuSampler
from engine.runner.logprobs import log_probabilities, read_prompt
from engine.runner.probe import ProbeReader
from engine.sampling.grammar import Words
from engine.sampling.logits_processors import LogitsRow, apply_logits_processors
from engine.sampling.sampler import Array, Floats, Ints, require_finite_logits, sample
from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence, ScoreSequence
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors

_MAX_LOGITS = 1 << 26
"""Maximum number of logits in memory at once while scores are read: 256 MiB, which no step of a small model has."""


class SampledTokens(NamedTuple):
    """Tokens that were sampled for one branch in a step."""

    sequence: GenerateSequence
    draft: Draft
    tokens: list[int]
    """The token after the branch's last one, then, for each draft token, the token after it."""
    logprobs: list[float]
    """Log-probabilities of ``tokens`` under the distributions that they were sampled from."""
    details: list[TokenLogprob]
    """Log-probabilities of ``tokens`` under the model's own distributions, if requested; else empty."""
    row: int
    """Row of the hidden state that predicted the first of ``tokens``; those of the others follow."""


class _SampleRequest(NamedTuple):
    sequence: GenerateSequence
    draft: Draft
    row: int
    """Row of its last token's hidden state; those of the draft tokens follow."""

    @property
    def num_samples(self) -> int:
        return 1 + len(self.draft.tokens)


class _ScoreRequest(NamedTuple):
    sequence: ScoreSequence
    position: int
    row: int


@dataclass(slots=True)
class _SampledRows:
    """Samples of a step, a row for each token, branch by branch."""

    tokens: Ints
    logprobs: Floats
    raw_logits: Tensor | None
    """Logits before logits processors of the rows whose log-probabilities are requested, on the host."""


Sampler = Callable[[Tensor, Sequence[LogitsRow], SamplingTensors[Array], NoiseKeys[Array]], tuple[Ints, Floats]]
"""Applies the logits processors in place and samples one token per row. See ``engine.sampling.sampler.sample``."""


def sample_on_cpu(
    logits: Tensor, rows: Sequence[LogitsRow], params: SamplingTensors[Array], noise_keys: NoiseKeys[Array]
) -> tuple[Ints, Floats]:
    """Sample from logits on the host; a ``Sampler``."""
    apply_logits_processors(logits, rows)
    return sample(logits, params, noise_keys)


def max_scored_rows(model: Model) -> int:
    """Return the maximum number of rows whose logits are in memory at once while scores are read."""
    return max(1, _MAX_LOGITS // (model.config.num_labels or model.config.vocab_size))


def rows_needed(scheduled: list[ScheduledSequence]) -> list[int] | None:
    """Return the rows of the batch whose hidden states ``sample_and_score`` reads, ascending; ``None`` for all."""
    if all(num_tokens == 1 for _, num_tokens, _ in scheduled):
        return None
    rows: list[int] = []
    start = 0
    for sequence, num_tokens, draft in scheduled:
        last = start + num_tokens - 1
        if isinstance(sequence, GenerateSequence):
            if sequence.prompt_logprobs is not None:
                return None
            if sequence.num_computed + num_tokens == len(sequence.tokens):
                rows += range(last, last + 1 + len(draft.tokens))
        elif isinstance(sequence, ScoreSequence):
            positions = sorted(set(sequence.read_positions))
            candidates = (start + position - sequence.num_computed for position in positions)
            rows += (row for row in candidates if start <= row <= last)
        start = last + 1 + len(draft.tokens)
    return rows if len(rows) < start else None


def sample_and_score(
    scheduled: list[ScheduledSequence],
    rows: list[int] | None,
    hidden: Tensor,
    model: Model,
    fused_sampler: FusedCpuSampler | None,
    sampler: Sampler,
    probe: ProbeReader | None = None,
) -> list[SampledTokens]:
    """Sample for every branch whose tokens are all computed now, and set scores and prompts' log-probabilities.

    ``scheduled`` is in the order of the batch and not committed yet. ``hidden`` ``[rows, width]``: the final hidden
    states of its ``rows_needed``. ``fused_sampler`` is tried before ``sampler``. ``probe`` is needed if a sequence is
    probed. Raises ``EngineError`` if logits are not finite.
    """
    samples, scores = _collect_requests(scheduled, rows, hidden, model)
    for token_ids, requests in scores.items():
        if requests[0].sequence.is_probed and probe is not None:
            values_by_row = [(probe.read(request.row),) for request in requests]
        else:
            values_by_row = []
            for start in range(0, len(requests), max_scored_rows(model)):
                read = [row for *_, row in requests[start : start + max_scored_rows(model)]]
                values_by_row += model.compute_logits(_select_rows(hidden, read), token_ids).tolist()
        for (sequence, position, _), values in zip(requests, values_by_row, strict=True):
            require_finite_logits(all(map(math.isfinite, values)))
            sequence.values[position] = tuple(values)
    if not samples:
        return []
    num_logprobs = _num_logprobs_by_row(samples)
    sampled = _sample_fused(samples, num_logprobs, hidden, fused_sampler)
    if sampled is None:
        sampled = _sample(samples, num_logprobs, hidden, model, sampler)
    return _split_by_branch(samples, sampled, num_logprobs)


def _collect_requests(
    scheduled: list[ScheduledSequence], rows: list[int] | None, hidden: Tensor, model: Model
) -> tuple[list[_SampleRequest], dict[tuple[int, ...], list[_ScoreRequest]]]:
    """Return the branches to sample for, and the positions to score by the token ids whose logits are the scores.

    There are no token ids for classifiers, and none for language models' probes.

    Log-probabilities of prompts are read on the way.
    """
    samples: list[_SampleRequest] = []
    scores: dict[tuple[int, ...], list[_ScoreRequest]] = {}
    hidden_rows: Sequence[int] | Mapping[int, int]
    hidden_rows = range(len(hidden)) if rows is None else {row: index for index, row in enumerate(rows)}
    start = 0
    for sequence, num_tokens, draft in scheduled:
        end = sequence.num_computed + num_tokens
        if isinstance(sequence, GenerateSequence):
            if sequence.prompt_logprobs is not None and len(sequence.prompt_logprobs) < sequence.prompt_len:
                read_prompt(sequence, num_tokens, hidden[start : start + num_tokens], model)
            if end == len(sequence.tokens) and sequence.branch.max_tokens:
                samples.append(_SampleRequest(sequence, draft, hidden_rows[start + num_tokens - 1]))
        elif isinstance(sequence, ScoreSequence):
            for position in set(sequence.read_positions):
                if sequence.num_computed <= position < end:
                    row = hidden_rows[start + position - sequence.num_computed]
                    scores.setdefault(sequence.token_ids, []).append(_ScoreRequest(sequence, position, row))
        start += num_tokens + len(draft.tokens)
    return samples, scores


def _num_logprobs_by_row(requests: list[_SampleRequest]) -> dict[int, int]:
    """Return the number of likeliest tokens to report for each sampled row whose log-probabilities are requested."""
    num_logprobs: dict[int, int] = {}
    row = 0
    for request in requests:
        if request.sequence.logprobs is not None:
            rows = range(row, row + request.num_samples)
            num_logprobs |= dict.fromkeys(rows, request.sequence.sampling.logprobs or 0)
        row += request.num_samples
    return num_logprobs


def _sample_fused(
    requests: list[_SampleRequest],
    num_logprobs: Mapping[int, int],
    hidden: Tensor,
    fused_sampler: FusedCpuSampler | None,
) -> _SampledRows | None:
    """Sample in recorded kernels; ``None`` if there is no fused sampler or it does not support this step."""
    if fused_sampler is None:
        return None
    counts = [request.num_samples for request in requests]
    # Samples have distinct rows, so if there are as many samples as hidden states, they are all rows in order.
    if sum(counts) != hidden.shape[0] or any(request.sequence.has_logits_processors for request in requests):
        return None
    sampled = fused_sampler.sample(hidden, [request.sequence for request in requests], counts)
    if sampled is None:
        return None
    logits, tokens, logprobs = sampled
    return _SampledRows(tokens, logprobs, _select_rows(logits, num_logprobs) if num_logprobs else None)


def _sample(
    requests: list[_SampleRequest], num_logprobs: Mapping[int, int], hidden: Tensor, model: Model, sampler: Sampler
) -> _SampledRows:
    """Sample from logits on the device that computes them."""
    rows = [request.row + offset for request in requests for offset in range(request.num_samples)]
    logits = model.compute_logits(hidden if len(rows) == hidden.shape[0] else _select_rows(hidden, rows))
    # No wait of its own: the copy is complete once the sampled tokens, which are waited for, have arrived.
    raw_logits = _select_rows(logits, num_logprobs).to("cpu", non_blocking=True) if num_logprobs else None
    logits_rows: list[LogitsRow] = []
    if any(request.sequence.has_logits_processors for request in requests):
        logits_rows = [row for request in requests for row in _logits_rows(request.sequence, request.draft)]
    tokens, logprobs = sampler(logits, logits_rows, *_params_and_noise_keys(requests))
    return _SampledRows(tokens, logprobs, raw_logits)


def _split_by_branch(
    requests: list[_SampleRequest], sampled: _SampledRows, num_logprobs: Mapping[int, int]
) -> list[SampledTokens]:
    details: Iterator[TokenLogprob] = iter(())
    if sampled.raw_logits is not None:
        tokens_read = sampled.tokens[list(num_logprobs)]
        details = iter(log_probabilities(sampled.raw_logits.numpy(), tokens_read, list(num_logprobs.values())))
    tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
    by_branch: list[SampledTokens] = []
    end = 0
    for request in requests:
        start, end = end, end + request.num_samples
        sequence = request.sequence
        own_details = [] if sequence.logprobs is None else list(islice(details, request.num_samples))
        sampled_tokens = tokens[start:end], logprobs[start:end], own_details, request.row
        by_branch.append(SampledTokens(sequence, request.draft, *sampled_tokens))
    return by_branch


def _logits_rows(sequence: GenerateSequence, draft: Draft) -> Iterator[LogitsRow]:
    """Yield the logits rows of a branch: after its last token, and after each draft token."""
    masks: Sequence[Words | None] = [None] * (len(draft) + 1)
    if sequence.grammar is not None:
        masks = sequence.grammar.compute_masks(draft.tokens, draft.parents)
    if draft.is_chain:
        for depth in range(len(draft) + 1):
            yield sequence.logits_row(draft.tokens[:depth], depth, masks[depth])
        return
    for index in range(-1, len(draft)):
        path = draft.path(index)
        yield sequence.logits_row(path, len(path), masks[index + 1])


def _params_and_noise_keys(requests: list[_SampleRequest]) -> tuple[SamplingTensors[Array], NoiseKeys[Array]]:
    """Return the parameters and noise keys of every sampled row, branch by branch."""
    float_params: list[tuple[float, float, float]] = []
    int_params: list[tuple[int, int, int, int]] = []
    counts: list[int] = []
    depths: list[int] = []
    for sequence, draft, _ in requests:
        sampling, num_drafted = sequence.sampling, len(draft.tokens)
        float_params.append((sampling.temperature, sampling.top_p, sampling.min_p))
        int_params.append((sampling.top_k, sequence.seed, sequence.key, len(sequence.tokens)))
        counts.append(1 + num_drafted)
        depths += range(1 + num_drafted) if draft.is_chain else (0, *draft.depths)
    floats, ints = np.array(float_params), np.array(int_params, np.int64)
    if len(depths) > len(counts):
        branches = np.repeat(np.arange(len(counts)), counts)
        floats, ints = floats[branches], ints[branches]
        ints[:, 3] += depths
    temperature, top_p, min_p = floats.T
    top_k, seed, key, position = ints.T
    params = SamplingTensors(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    return params, NoiseKeys(seed=seed, key=key, position=position)


def _select_rows(rows: Tensor, indices: Iterable[int]) -> Tensor:
    return rows[to_device(torch.tensor(list(indices)), rows.device)]
