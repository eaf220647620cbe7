"""One step of a model from its launch to its results, and which step may be launched before those of another are read.

On a GPU the host plans and launches a step while the device computes the one before it, so the device does not wait for
the host. Sampled tokens stay on the device, where the next step takes them; in ``Sequence.tokens`` stands ``UNREAD``
until the host has read them. What follows from a token on the host, such as the end of a branch, happens one step late:
the branch is in one more step, whose sample is dropped. Counts are known without the tokens, so no step goes beyond
``max_tokens`` or the context, and a page whose tokens are known enters the radix tree when its step is launched.

Whatever a step in flight reads or writes may be freed: what uses it next is launched later, on the same stream.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from engine.cache.paged_kv import KVCache
from engine.core.loaded_model import LoadedModel
from engine.device import DeviceEvent, record_event
from engine.models.interface import Batch, UnreadTokens
from engine.runner.batch import ScheduledSequence, build_batch
from engine.runner.decode_batch import DecodeBatch, find_decode_batch
from engine.runner.forward import Forward
from engine.runner.probe import ProbeReader
from engine.runner.sample_step import PendingResults, SampledTokens, Sampler, rows_needed, sample_and_score
from engine.sampling.sampler import require_finite_logits
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import UNREAD, GenerateSequence, ScoreSequence, Sequence
from engine.scheduler.timings import Timings
from engine.speculation.speculator import Speculator

StepWork = list[tuple[Sequence, int]]
"""Sequences with the number of tokens that a step computes of them."""


@dataclass(slots=True)
class LaunchedStep:
    """A step that the device computes, or has computed."""

    work: StepWork
    scheduled: list[ScheduledSequence]
    """The same in the order of the batch, with drafts."""
    decode: DecodeBatch | None
    """The batch, if the step only decodes without drafts."""
    results: PendingResults
    probe: ProbeReader | None
    """Reader of the hidden states of a step with probed branches; valid until the next step is launched."""
    speculator: Speculator | None
    """Speculation that reads the step's results; ``None`` if it skips the step."""
    observed: tuple[Tensor, abc.Mapping[int, Tensor]] | None
    """Hidden states for the speculator, as of ``Forward``."""
    event: DeviceEvent
    """The end of the step on the device."""
    is_read_at_once: bool
    """True if nothing is launched before the results are read: on a CPU, which has them when the launch returns, and
    with speculation, as what follows depends on the accepted tokens."""
    completed: list[Sequence] = field(default_factory=list)
    """Sequences that end with this step without a sampled token: scored ones, and branches that only read a prompt."""
    num_scored: int = 0
    """Tokens computed of scored sequences."""


@dataclass(slots=True)
class StepsInFlight:
    """The latest steps, whose results are not read."""

    latest: LaunchedStep | None = None
    """The step that the next one may follow before its results are read."""
    unread: LaunchedStep | None = None
    """The step before it, whose results are read next."""
    decode: DecodeBatch | None = None
    """Branches of the step that was launched last, if it only decoded without drafts."""

    def __bool__(self) -> bool:
        return self.latest is not None or self.unread is not None

    def move(self) -> LaunchedStep | None:
        """Make the latest step the one to read next, and return it."""
        self.unread, self.latest = self.latest, None
        return self.unread

    def take_unread(self) -> LaunchedStep:
        """Return the step to read, which is no longer in flight then."""
        step, self.unread = self.unread, None
        if step is None:
            raise RuntimeError("there is no step to read")
        return step

    def clear(self) -> None:
        """Forget all steps; what the device still computes of them is not read."""
        self.latest = self.unread = self.decode = None


def must_read_first(
    step: LaunchedStep, scheduler: Scheduler, speculator: Speculator | None, *, is_bisecting: bool
) -> bool:
    """Return True if the results of a step in flight must be read before the next one is planned.

    This is the only place where that is decided. Ends that clients or deadlines cause need no results: such branches
    have the tokens that were read, and their rows in flight are dropped.
    """
    plan = step.results.plan
    return (
        # A failure must be seen before jobs that are not suspected of it run.
        is_bisecting
        # The host computes penalties and grammar masks from the tokens.
        or (plan is not None and plan.reads_own_tokens)
        # The probe reads hidden states that the next step overwrites, of those branches that end.
        or step.probe is not None
        # The drafter continues the tokens, or observes how they follow.
        or (speculator is not None and speculator.reads_next_step)
        # Branches that end may leave enough pages, so that none must be preempted; and what a preempted one has
        # computed is then known to the radix tree.
        or scheduler.may_preempt()
    )


def launch_step(
    work: StepWork,
    steps: StepsInFlight,
    model: LoadedModel,
    cache: KVCache,
    forward: Forward,
    sampler: Sampler,
    speculator: Speculator | None,
    step_tokens: int,
) -> LaunchedStep:
    """Launch a step of scheduled sequences after ``steps``, of which one may be in flight."""
    previous, last_decode = steps.unread, steps.decode
    steps.decode = None
    if speculator is None or speculator.should_skip_step(len(work), has_unread=previous is not None):
        speculator, decode = None, find_decode_batch(work, last_decode)
        scheduled = decode.scheduled if decode else [ScheduledSequence(*entry) for entry in work]
    else:
        scheduled, decode = speculator.add_drafts(work, step_tokens), None
    decode_rows, plan = (decode.rows, decode.samples) if decode else (None, None)
    batch, rows, scheduled = build_batch(scheduled, cache, model.config.attention[0], decode_rows)
    if previous is not None:
        batch = _take_unread(batch, scheduled, decode, previous)
    needs_all_rows = speculator is not None and speculator.needs_all_hidden_states
    read = None if needs_all_rows or decode else rows_needed(scheduled)
    layers = model.probed_layers(sequence for sequence, *_ in scheduled)
    if speculator is not None:
        layers |= speculator.observed_layers
    hidden = forward(batch, rows, read, layers)
    probe = model.create_probe_reader(forward.kept, hidden, read, scheduled)
    results = sample_and_score(scheduled, read, hidden, model.decoder, forward.fused_sampler, sampler, probe, plan)
    observed = None if speculator is None else (hidden, forward.kept)
    steps.decode = decode
    device_config = model.decoder.device_config
    event, is_read_at_once = record_event(device_config.device), bool(speculator or not device_config.uses_gpu_kernels)
    return LaunchedStep(work, scheduled, decode, results, probe, speculator, observed, event, is_read_at_once)


def commit(step: LaunchedStep, cache: KVCache, timings: Timings, started_at: float) -> None:
    """Count the scheduled tokens of a launched step as computed; draft tokens are not yet."""
    for sequence, num_tokens, _ in step.scheduled:
        if sequence.started_at is None:
            timings.record_start(sequence, started_at)
        completes_prefix = advance_computed(cache, sequence, num_tokens)
        if isinstance(sequence, ScoreSequence):
            step.num_scored += num_tokens
            if completes_prefix:
                step.completed.append(sequence)
        elif completes_prefix and isinstance(sequence, GenerateSequence) and not sequence.branch.max_tokens:
            step.completed.append(sequence)


def advance_computed(cache: KVCache, sequence: Sequence, num_tokens: int) -> bool:
    """Count more tokens as computed and share full pages; return True if they complete the sequence's prefix."""
    page_size = cache.page_size
    before, sequence.num_computed = sequence.num_computed, sequence.num_computed + num_tokens
    completes_prefix = before < sequence.num_prefix_tokens <= sequence.num_computed
    is_full = completes_prefix or sequence.num_computed // page_size > before // page_size
    # A page that an unread token fills is shared when that is read (``share_read_page``).
    if is_full and sequence.tokens[sequence.num_computed - 1] != UNREAD:
        cache.publish(sequence.pages, sequence.tokens, sequence.num_computed, include_partial=completes_prefix)
    return completes_prefix


def move_accepted(cache: KVCache, sampled: list[SampledTokens], paths: list[tuple[int, ...]]) -> None:
    """Move the keys and values of a tree's accepted path to the slots of its tokens in the sequence."""
    moves = [
        (samples.sequence.pages, samples.sequence.num_computed + index, samples.sequence.num_computed + depth)
        for samples, path in zip(sampled, paths, strict=True)
        if path and path[-1] != len(path) - 1  # else it is the beginning of the draft
        for depth, index in enumerate(path)
        if index != depth
    ]
    if moves:
        cache.move_tokens(moves)


def append_samples(cache: KVCache, samples: SampledTokens, indices: abc.Sequence[int]) -> bool:
    """Append some of the sampled tokens to their branch; those before the last are accepted draft tokens.

    Returns True if the next step is in flight and computes keys and values of the last token. Raises
    ``LogitsNotFinite`` if one of the tokens could not be sampled.
    """
    sequence = samples.sequence
    require_finite_logits(all(samples.tokens[index] >= 0 for index in indices))
    for index in indices:
        detail = samples.details[index] if samples.details else None
        sequence.append(samples.tokens[index], samples.logprobs[index], detail)
    num_accepted = sequence.num_read - 1 - sequence.num_computed
    if num_accepted > 0:
        sequence.num_accepted += num_accepted
        advance_computed(cache, sequence, num_accepted)
    return num_accepted < 0


def share_read_page(cache: KVCache, sequence: GenerateSequence) -> None:
    """Share the page that a branch's last token fills, which was computed before the token was read."""
    if sequence.num_read % cache.page_size == 0:
        cache.publish(sequence.pages, sequence.tokens, sequence.num_read, include_partial=False)


def drop_last_computed(sequence: GenerateSequence) -> None:
    """Forget the step in flight of a branch that ends with its last token."""
    sequence.drop_unread()
    sequence.num_computed = sequence.num_read - 1


def append_unread(step: LaunchedStep, context: int) -> None:
    """Append an unread token to each sampled branch that it does not end by its count.

    ``context``: maximum number of tokens of a sequence.
    """
    for sequence, *_ in [] if step.results.plan is None else step.results.plan.requests:
        length = len(sequence.tokens) + 1
        if length < sequence.max_len and length < context:
            sequence.tokens.append(UNREAD)


def _take_unread(
    batch: Batch, scheduled: abc.Sequence[ScheduledSequence], decode: DecodeBatch | None, previous: LaunchedStep
) -> Batch:
    """Return a batch that takes its unread tokens from the step in flight."""
    plan, sampled = previous.results.plan, previous.results.tokens_gpu
    if plan is None or sampled is None:
        return batch
    if decode is not None and decode is previous.decode:
        return Batch(batch.tokens, batch.positions, UnreadTokens(sampled))
    # Sequences with one new token come first in a batch, so a row is also the index of its sequence.
    rows = np.flatnonzero(batch.tokens.numpy() == UNREAD).tolist()
    if not rows:
        return batch
    sources: dict[Sequence, int] = {request.sequence: index for index, request in enumerate(plan.requests)}
    indices = [sources[scheduled[row].sequence] for row in rows]
    return Batch(batch.tokens, batch.positions, UnreadTokens(sampled, (rows, indices)))
