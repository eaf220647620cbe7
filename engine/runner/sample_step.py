"""The results of a step's hidden states: sampled tokens, log-probabilities of prompts, and scores.

``sample_and_score`` launches their computation and ``PendingResults.read`` takes them, on a GPU some time later."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device import to_device, to_host
from engine.models.interface import Model
from engine.protocol.types import TokenLogprob
from engine.runner.batch import ScheduledSequence
from engine.runner.fused_sampler_cpu import FusedCpuSampler
from engine.runner.fused_sampler_gpu import FusedGpuSampler
from engine.runner.logprobs import compute_logprobs, log_probabilities, read_prompt
from engine.runner.probe import ProbeReader
from engine.sampling.grammar import Words
from engine.sampling.logits_processors import LogitsRow, apply_logits_processors
from engine.sampling.sampler import Array, Ints, LogitsNotFinite
from engine.sampling.samples import DeviceSamples, HostSamples, Samples
from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence, ScoreSequence
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors
from kernels.cpu.sampling.sampler import sample

FusedSampler = FusedCpuSampler | FusedGpuSampler
"""Sampler that computes logits and samples in recorded kernels or in a CUDA graph."""

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


class SampleRequest(NamedTuple):
    """A branch to sample for."""

    sequence: GenerateSequence
    draft: Draft
    row: int
    """Row of its last token's hidden state; those of the draft tokens follow."""

    @property
    def num_samples(self) -> int:
        return 1 + len(self.draft.tokens)


class SamplePlan:
    """The rows to sample in a step, branch by branch, and their parameters.

    It holds for later steps of the same branches with the same drafts: only their positions are read in each step.
    """

    def __init__(self, requests: list[SampleRequest]) -> None:
        self.requests = requests
        self.rows = [request.row + offset for request in requests for offset in range(request.num_samples)]
        """Row of the hidden state of each sample."""
        self.num_logprobs = _num_logprobs_by_row(requests)
        """Number of likeliest tokens to report, by sample; samples whose log-probabilities are not requested are
        left out."""
        self.can_change_logits = any(request.sequence.can_have_logits_processors for request in requests)
        self._reads_first_rows = self.rows == list(range(len(self.rows)))
        self.single_results: list[SampledTokens] | None = None
        """Results to overwrite in each step, if each branch has one sample and none has details: making hundreds of
        them anew takes longer than the rest of their step, and wakes the garbage collector."""
        if len(self.rows) == len(requests) and not self.num_logprobs:
            self.single_results = [
                SampledTokens(sequence, draft, tokens=[-1], logprobs=[0.0], details=[], row=row)
                for sequence, draft, row in requests
            ]
        drafts = [request.draft for request in requests]
        self._sequences = [request.sequence for request in requests]
        self._branches: Ints | None = None
        """Index of each sample's branch, unless each has one sample."""
        if len(self.rows) > len(requests):
            counts = [request.num_samples for request in requests]
            self._branches = np.repeat(np.arange(len(counts)), counts)
            self._depths = np.array([depth for draft in drafts for depth in (0, *draft.depths)])
        floats = np.array(
            [(one.sampling.temperature, one.sampling.top_p, one.sampling.min_p) for one in self._sequences]
        )
        ints = np.array([(one.sampling.top_k, one.seed, one.key) for one in self._sequences], np.int64)
        if self._branches is not None:
            floats, ints = floats[self._branches], ints[self._branches]
        temperature, top_p, min_p = floats.T
        top_k, self._seed, self._key = ints.T
        self.params: SamplingTensors[Array] = SamplingTensors(temperature, top_p, min_p, top_k)

    def select(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of the samples."""
        if self._reads_first_rows:
            return hidden if len(self.rows) == hidden.shape[0] else hidden[: len(self.rows)]
        return _select_rows(hidden, self.rows)

    def noise_keys(self) -> NoiseKeys[Array]:
        """Return the noise keys of the samples at the branches' present positions."""
        position = np.array([len(sequence.tokens) for sequence in self._sequences])
        if self._branches is not None:
            position = position[self._branches] + self._depths
        return NoiseKeys(self._seed, self._key, position)

    @property
    def changes_logits(self) -> bool:
        """True if logits processors change the logits of a sample now."""
        return self.can_change_logits and any(sequence.has_logits_processors for sequence in self._sequences)

    @property
    def reads_own_tokens(self) -> bool:
        """True if a branch's next logits depend on the token that is sampled now in other ways than through the
        model."""
        return self.can_change_logits and any(sequence.reads_own_tokens for sequence in self._sequences)


_Outputs = tuple[tuple[int, ...], bool]
"""Token ids whose logits are scores, and True if their log-probabilities are."""


class _ScoreRequest(NamedTuple):
    sequence: ScoreSequence
    position: int
    row: int


class _PendingScores(NamedTuple):
    """Scores of some positions, the values of each in a row of the tensors, which come one after the other."""

    requests: list[_ScoreRequest]
    values: list[Tensor]
    """On the host once the step is finished."""


@dataclass(slots=True)
class _SampledRows:
    """Samples of a step, a row for each token, branch by branch."""

    samples: Samples
    raw_logits: Tensor | None
    """Logits before logits processors of the rows whose log-probabilities are requested, on the host."""


@dataclass(slots=True)
class PendingResults:
    """Results of a step, which may be in flight."""

    plan: SamplePlan | None = None
    """Samples of the step, if there are any."""
    scores: list[_PendingScores] = field(default_factory=list)
    sampled: _SampledRows | None = None

    @property
    def tokens_gpu(self) -> Tensor | None:
        """The sampled tokens on the device, in the order of the plan; ``None`` without any."""
        return None if self.sampled is None else self.sampled.samples.tokens_gpu

    def read(self) -> list[SampledTokens]:
        """Set the scores and return the sampled tokens, once the step is finished.

        Branches and items that have ended since the step was launched are left out, or to be ignored. Tokens are -1
        where logits are not finite; items with such logits fail.
        """
        for requests, values in self.scores:
            for (sequence, position, _), own in zip(requests, torch.cat(values).tolist(), strict=True):
                if not all(map(math.isfinite, own)):
                    sequence.fail(LogitsNotFinite())
                elif sequence.table is not None:
                    sequence.values[position] = tuple(own)
        return [] if self.plan is None or self.sampled is None else _split_by_branch(self.plan, self.sampled)


Sampler = Callable[[Tensor, Sequence[LogitsRow], SamplingTensors[Array], NoiseKeys[Array]], Samples]
"""Applies the logits processors in place and samples one token per row. See ``engine.sampling.sampler.sample``."""


def sample_on_cpu(
    logits: Tensor, rows: Sequence[LogitsRow], params: SamplingTensors[Array], noise_keys: NoiseKeys[Array]
) -> Samples:
    """Sample from logits on the host; a ``Sampler``."""
    apply_logits_processors(logits, rows)
    return HostSamples(*sample(logits, params, noise_keys))


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
    *,
    hidden: Tensor,
    rows: list[int] | None,
    model: Model,
    sampler: Sampler,
    fused_sampler: FusedSampler | None,
    probe: ProbeReader | None = None,
    plan: SamplePlan | None = None,
) -> PendingResults:
    """Sample for every branch whose tokens are all computed now, score, and set prompts' log-probabilities.

    ``scheduled`` is in the order of the batch and not committed yet. ``hidden`` ``[rows, width]``: the final hidden
    states of ``rows``, its ``rows_needed``. ``fused_sampler`` is tried before ``sampler``. ``probe`` is needed if a
    sequence is probed. ``plan``: that of the step, if it only samples and the plan is known. A sequence whose own data
    makes an error fails (``Sequence.fail``), and no other.
    """
    scores: list[_PendingScores] = []
    if plan is None:
        requests, scores = _score(scheduled, hidden=hidden, rows=rows, model=model, probe=probe)
        if not requests:
            return PendingResults(scores=scores)
        plan = SamplePlan(requests)
    sampled = _sample_fused(plan, hidden, fused_sampler)
    if sampled is None:
        sampled = _sample(plan, hidden, model, sampler)
    return PendingResults(plan, scores, sampled)


def _score(
    scheduled: list[ScheduledSequence],
    *,
    hidden: Tensor,
    rows: list[int] | None,
    model: Model,
    probe: ProbeReader | None,
) -> tuple[list[SampleRequest], list[_PendingScores]]:
    """Set the prompts' log-probabilities of a step; return the branches to sample for, and the scores."""
    samples, by_outputs = _collect_requests(scheduled, rows, hidden, model)
    scores: list[_PendingScores] = []
    for (token_ids, is_normalized), requests in by_outputs.items():
        if requests[0].sequence.is_probed and probe is not None:
            values = [torch.tensor([[_read_probe(probe, request)] for request in requests], dtype=torch.float64)]
        else:
            values = []
            for start in range(0, len(requests), max_scored_rows(model)):
                read = [row for *_, row in requests[start : start + max_scored_rows(model)]]
                selected = _select_rows(hidden, read)
                if is_normalized:
                    values.append(to_host(compute_logprobs(model.compute_logits(selected), token_ids)))
                else:
                    values.append(to_host(model.compute_logits(selected, token_ids)))
        scores.append(_PendingScores(requests, values))
    return samples, scores


def _read_probe(probe: ProbeReader, request: _ScoreRequest) -> float:
    score = math.nan
    with request.sequence.isolate_errors():
        score = probe.read(request.row)
    return score


def _collect_requests(
    scheduled: list[ScheduledSequence], rows: list[int] | None, hidden: Tensor, model: Model
) -> tuple[list[SampleRequest], dict[_Outputs, list[_ScoreRequest]]]:
    """Return the branches to sample for, and the positions to score by the outputs that are their scores.

    There are no token ids for classifiers, and none for language models' probes. Log-probabilities of prompts are read
    on the way.
    """
    samples: list[SampleRequest] = []
    scores: dict[_Outputs, list[_ScoreRequest]] = {}
    hidden_rows: Sequence[int] | Mapping[int, int]
    hidden_rows = range(len(hidden)) if rows is None else {row: index for index, row in enumerate(rows)}
    start = 0
    for sequence, num_tokens, draft in scheduled:
        end = sequence.num_computed + num_tokens
        if isinstance(sequence, GenerateSequence):
            if sequence.prompt_logprobs is not None and len(sequence.prompt_logprobs) < sequence.prompt_len:
                with sequence.isolate_errors():
                    read_prompt(sequence, num_tokens, hidden[start : start + num_tokens], model)
            if end == len(sequence.tokens) and sequence.branch.max_tokens:
                samples.append(SampleRequest(sequence, draft, hidden_rows[start + num_tokens - 1]))
        elif isinstance(sequence, ScoreSequence):
            for position in set(sequence.read_positions):
                if sequence.num_computed <= position < end:
                    row = hidden_rows[start + position - sequence.num_computed]
                    outputs = sequence.token_ids, sequence.is_normalized
                    scores.setdefault(outputs, []).append(_ScoreRequest(sequence, position, row))
        start += num_tokens + len(draft.tokens)
    return samples, scores


def _num_logprobs_by_row(requests: list[SampleRequest]) -> dict[int, int]:
    """Return the number of likeliest tokens to report for each sampled row whose log-probabilities are requested."""
    num_logprobs: dict[int, int] = {}
    row = 0
    for request in requests:
        if request.sequence.logprobs is not None:
            rows = range(row, row + request.num_samples)
            num_logprobs |= dict.fromkeys(rows, request.sequence.sampling.logprobs or 0)
        row += request.num_samples
    return num_logprobs


def _sample_fused(plan: SamplePlan, hidden: Tensor, fused_sampler: FusedSampler | None) -> _SampledRows | None:
    """Sample in recorded kernels; ``None`` if there is no fused sampler or it does not support this step."""
    if fused_sampler is None or plan.changes_logits:
        return None
    if isinstance(fused_sampler, FusedGpuSampler):
        # Its logits are overwritten by the next step, so nothing more is read from them.
        samples = None
        if not plan.num_logprobs:
            samples = fused_sampler.launch(plan.select(hidden), plan.params, plan.noise_keys())
        return None if samples is None else _SampledRows(DeviceSamples(samples), None)
    # Samples have distinct rows, so if there are as many samples as hidden states, they are all rows in order.
    if len(plan.rows) != hidden.shape[0]:
        return None
    requests = plan.requests
    counts = [request.num_samples for request in requests]
    sampled = fused_sampler.sample(hidden, [request.sequence for request in requests], counts)
    if sampled is None:
        return None
    logits, tokens, logprobs = sampled
    raw_logits = _select_rows(logits, plan.num_logprobs) if plan.num_logprobs else None
    return _SampledRows(HostSamples(tokens, logprobs), raw_logits)


def _sample(plan: SamplePlan, hidden: Tensor, model: Model, sampler: Sampler) -> _SampledRows:
    """Sample from logits on the device that computes them."""
    logits = model.compute_logits(plan.select(hidden))
    raw_logits = to_host(_select_rows(logits, plan.num_logprobs)) if plan.num_logprobs else None
    logits_rows: list[LogitsRow] = []
    if plan.changes_logits:
        logits_rows = [row for request in plan.requests for row in _logits_rows(request.sequence, request.draft)]
    return _SampledRows(sampler(logits, logits_rows, plan.params, plan.noise_keys()), raw_logits)


def _split_by_branch(plan: SamplePlan, sampled: _SampledRows) -> list[SampledTokens]:
    details: Iterator[TokenLogprob] = iter(())
    num_logprobs = plan.num_logprobs
    sampled_tokens, sampled_logprobs = sampled.samples.read()
    if sampled.raw_logits is not None:
        raw_logits, rows = sampled.raw_logits.numpy(), np.array(list(num_logprobs))
        invalid = (sampled_tokens[rows] < 0) | ~np.isfinite(raw_logits.max(axis=-1))
        if invalid.any():  # their branches fail
            raw_logits[invalid], sampled_tokens[rows[invalid]] = 0.0, -1
        tokens_read = np.maximum(sampled_tokens[rows], 0)
        details = iter(log_probabilities(raw_logits, tokens_read, list(num_logprobs.values())))
    tokens, logprobs = sampled_tokens.tolist(), sampled_logprobs.tolist()
    if plan.single_results is not None:
        for result, token, logprob in zip(plan.single_results, tokens, logprobs, strict=True):
            result.tokens[0], result.logprobs[0] = token, logprob
        return plan.single_results
    by_branch: list[SampledTokens] = []
    end = 0
    for request in plan.requests:
        start, end = end, end + request.num_samples
        sequence = request.sequence
        own_details = [] if sequence.logprobs is None else list(islice(details, request.num_samples))
        by_branch.append(
            SampledTokens(
                sequence,
                request.draft,
                tokens=tokens[start:end],
                logprobs=logprobs[start:end],
                details=own_details,
                row=request.row,
            )
        )
    return by_branch


def _logits_rows(sequence: GenerateSequence, draft: Draft) -> Iterator[LogitsRow]:
    """Yield the logits rows of a branch: after its last token, and after each draft token."""
    masks: Sequence[Words | None] = [None] * (len(draft) + 1)
    if sequence.grammar is not None:
        with sequence.isolate_errors():  # if the branch ends, it does not matter what is sampled for it
            masks = sequence.grammar.compute_masks(draft.tokens, draft.parents)
    if draft.is_chain:
        for depth in range(len(draft) + 1):
            yield sequence.logits_row(draft.tokens[:depth], depth, masks[depth])
        return
    for index in range(-1, len(draft)):
        path = draft.path(index)
        yield sequence.logits_row(path, len(path), masks[index + 1])


def _select_rows(rows: Tensor, indices: Iterable[int]) -> Tensor:
    return rows[to_device(torch.tensor(list(indices)), rows.device)]
