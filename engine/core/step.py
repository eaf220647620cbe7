"""The steps of one model over its cache: launch, commit, read.

On a GPU the host plans and launches a step while the device computes the one before it, so the device does not wait for
the host. Sampled tokens stay on the device, where the next step takes them; ``Sequence.tokens`` has ``PENDING_TOKEN``
until the host has read them. What follows from a token on the host, such as the end of a branch, happens one step late:
the branch is in one more step, whose sample is dropped. Counts are known without the tokens, so no step goes beyond
``max_tokens`` or the context, and a page whose tokens are known enters the radix tree when its step is launched.

Whatever a step in flight reads or writes may be freed: what uses it next is launched later, on the same stream.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from engine.cache.paged_kv import KVCache
from engine.cache.states import SequenceState, StateWork
from engine.core.gpu_memory import NotEnoughMemory
from engine.core.loaded_model import LoadedModel
from engine.core.model_setup import ModelWeights, create_speculator
from engine.device import DeviceEvent, record_event, release_freed_memory
from engine.models.interface import Batch, UnreadTokens
from engine.offloading.costs import Costs
from engine.offloading.loads import Loader
from engine.offloading.setup import create_loader
from engine.protocol.options import EngineOptions
from engine.protocol.types import FinishReason
from engine.runner.batch import ScheduledSequence, build_batch
from engine.runner.decode_batch import DecodeBatch, find_decode_batch
from engine.runner.forward import Forward, create_forward
from engine.runner.probe import ProbeReader
from engine.runner.sample_step import (
    PendingResults,
    SampledTokens,
    Sampler,
    rows_needed,
    sample_and_score,
    sample_on_cpu,
)
from engine.runner.states import create_states, limit_drafts, plan_states
from engine.runner.warm_up import warm_up
from engine.sampling.gpu import sample_on_gpu
from engine.sampling.sampler import require_finite_logits
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import PENDING_TOKEN, GenerateSequence, ScoreSequence, Sequence
from engine.scheduler.timings import Timings
from engine.speculation.control.controller import Controller, DraftOutcome
from engine.speculation.drafter import Drafter
from engine.speculation.speculator import Speculator
from engine.speculation.verify import find_accepted

StepWork = list[tuple[Sequence, int]]
"""Sequences with the number of tokens that a step computes of them."""

Finish = tuple[FinishReason, str | int | None]
"""Finish reason, and the stop string or stop token that ended the branch, if one did."""

_NO_ACCEPTED = ((0,),)
"""Parts of the samples that a branch without accepted draft tokens gets."""


@dataclass(slots=True)
class Step:
    """A step that the device computes, or has computed."""

    work: StepWork
    scheduled: list[ScheduledSequence]
    """The same in the order of the batch, with drafts."""
    decode: DecodeBatch | None
    """The batch, if the step only decodes without drafts."""
    results: PendingResults
    probe: ProbeReader | None
    """Reader of the hidden states of a step with probed branches; valid until the next step is launched."""
    hidden: Tensor | None
    """Final hidden states for the speculator; ``None`` if it skips the step."""
    kept: Mapping[int, Tensor]
    """Hidden states after earlier layers, as of ``Forward``."""
    event: DeviceEvent
    """The end of the step on the device."""
    is_synchronous: bool
    """True if nothing is launched before the results are read: on a CPU, which has them when the launch returns, and
    with speculation, as what follows depends on the accepted tokens."""
    completed: list[Sequence] = field(default_factory=list)
    """Sequences that end with this step without a sampled token: scored ones, and branches that only read a prompt."""
    num_scored: int = 0
    """Tokens computed of scored sequences."""
    states: dict[Sequence, StateWork] = field(default_factory=dict)
    """The work of the step on the states of its sequences, if the model has states."""
    accepted: dict[Sequence, tuple[int, ...]] = field(default_factory=dict)
    """Indices of the accepted tokens of each draft, once the step is read."""
    outcomes: list[DraftOutcome] = field(default_factory=list)
    """Outcomes of the drafts of branches whose tokens were appended."""
    launched_at: float = 0.0
    """Time of ``time.perf_counter`` before the launch."""


class StepRunner:
    """Runs a model's steps: owns its cache, forward pass, sampler and speculation, and the steps in flight."""

    cache: KVCache
    forward: Forward

    def __init__(
        self,
        model: LoadedModel,
        weights: ModelWeights,
        options: EngineOptions,
        timings: Timings,
        *,
        num_tokens: int,
    ) -> None:
        """Create an empty cache of ``num_tokens`` tokens. Raises ``NotEnoughMemory`` if there is no room for it."""
        self.model = model
        self.device_config = weights.device_config
        self.speculator = create_speculator(weights.drafter, options, context=model.info.context)
        self.sampler: Sampler = sample_on_gpu if self.device_config.uses_gpu_kernels else sample_on_cpu
        self.loader: Loader | None = None
        """Brings prefixes back from the cache's lower tier, if it has one."""
        self.costs = Costs()
        self.unread: Step | None = None
        """The step whose results are read next."""
        self._last_step_end = 0.0
        self.num_generated = 0
        self.num_scored = 0
        self.num_pages = num_tokens // options.page_size
        self._latest: Step | None = None
        """The step after ``unread``, whose results are not read before another step follows it."""
        self._decode: DecodeBatch | None = None
        """Branches of the step that was launched last, if it only decoded without drafts."""
        self._options = options
        self._kv_dtype = weights.kv_dtype
        self._bytes_per_token = weights.bytes_per_token
        self._num_state_slots = weights.num_state_slots
        self._timings = timings
        try:
            self._create_cache()
        except RuntimeError as error:
            num_bytes = num_tokens * weights.bytes_per_token
            raise NotEnoughMemory(f"{num_tokens} tokens of keys and values need {num_bytes} bytes: {error}") from None
        warm_up(
            model.decoder,
            self.cache,
            self.forward,
            name=model.info.id,
            step_tokens=options.step_tokens,
            drafter=weights.drafter,
        )

    # The cache and what computes over it.

    def start_speculation(self, drafter: Drafter, controller: Controller) -> None:
        """Draft with another drafter from now on, over a new cache. Nothing else may hold the old one."""
        self._free_forward()
        del self.cache
        trees = not self._options.deterministic
        self.speculator = Speculator(drafter, controller, context=self.model.info.context, trees=trees)
        self._create_cache()

    def reset(self) -> None:
        """Empty the cache, whose state is unknown, and forget all steps."""
        self._free_forward()
        self.cache.reset()
        self._connect()

    def clear_cache(self) -> None:
        """Drop every cached prefix that no running sequence uses."""
        self.cache.clear()
        if self.speculator is not None:
            self.speculator.drafter.clear_cache()

    def release(self, sequence: Sequence) -> None:
        """Release the drafter's state of an ended sequence."""
        if self.speculator is not None and isinstance(sequence, GenerateSequence):
            self.speculator.release(sequence)

    def close(self) -> None:
        """Stop the threads of the cache's lower tier, and remove its files."""
        if self.loader is not None:
            self.loader.close()

    def _create_cache(self) -> None:
        config, options = self.model.config, self._options
        self.close()
        draft_shapes = () if self.speculator is None else self.speculator.drafter.key_shapes
        self.cache = KVCache(
            layers=[*config.head_shapes, *draft_shapes],
            pages=self.num_pages,
            page_size=options.page_size,
            rows=options.max_running,
            context=self.model.info.context,
            device_config=self.device_config,
            dtype=self._kv_dtype,
            states=create_states(
                config, options, self._num_state_slots, self._bytes_per_token, device_config=self.device_config
            ),
            max_pinned=int(self.num_pages * options.lease_share),
            pin_seconds=options.lease_seconds,
        )
        self.loader = create_loader(self.cache, options, self.model.info.fingerprint or "", self.costs)
        self._connect()

    def _free_forward(self) -> None:
        """Free the forward pass with its graphs, which a GPU has no room to keep while another one is created."""
        self.forget_steps()
        del self.forward
        release_freed_memory(self.device_config.device)

    def _connect(self) -> None:
        """Create the forward pass over the cache, which is empty, and reset the drafter."""
        self.forward = create_forward(self.model.decoder, self.cache)
        if self.speculator is not None:
            self.speculator.reset(self.cache)

    # Steps in flight.

    @property
    def has_steps(self) -> bool:
        """True if the results of a step are not read."""
        return self._latest is not None or self.unread is not None

    def rotate(self) -> None:
        """Make the latest step the one to read next."""
        self.unread, self._latest = self._latest, None

    def take_unread(self) -> Step:
        """Return the step to read, which is no longer in flight then."""
        step, self.unread = self.unread, None
        if step is None:
            raise RuntimeError("there is no step to read")
        return step

    def forget_steps(self) -> None:
        """Forget all steps; what the device still computes of them is not read."""
        self._latest = self.unread = self._decode = None

    def must_read_first(self, scheduler: Scheduler, *, is_bisecting: bool) -> bool:
        """Return True if the results of the step in flight must be read before the next one is planned.

        This is the only place where that is decided. Ends that clients or deadlines cause need no results: such
        branches have the tokens that were read, and their rows in flight are dropped.
        """
        step = self.unread
        if step is None:
            return False
        plan = step.results.plan
        return (
            # A failure must be seen before requests that are not suspected of it run.
            is_bisecting
            # The host computes penalties and grammar masks from the tokens.
            or (plan is not None and plan.reads_own_tokens)
            # The probe reads hidden states that the next step overwrites, of those branches that end.
            or step.probe is not None
            # The drafter continues the tokens, or observes how they follow.
            or (self.speculator is not None and self.speculator.reads_next_step)
            # Branches that end may leave enough pages, so that none must be preempted; and what a preempted one has
            # computed is then known to the radix tree.
            or scheduler.may_preempt()
        )

    # Launch and commit.

    def launch(self, work: StepWork, now: float) -> Step:
        """Launch a step of scheduled sequences and commit it; the step before it may be in flight."""
        started = time.perf_counter()
        step = self._launch(work)
        step.launched_at = started
        self._commit(step, now)
        if not step.is_synchronous:
            self._append_unread(step)
            self._latest = step
        return step

    def _launch(self, work: StepWork) -> Step:
        """Draft, build the batch, compute it and sample, without waiting for the device."""
        model, forward, previous, speculator = self.model, self.forward, self.unread, self.speculator
        last_decode, self._decode = self._decode, None
        if speculator is None or speculator.should_skip_step(len(work), has_unread=previous is not None):
            speculator, decode = None, find_decode_batch(work, last_decode)
            scheduled = (
                decode.scheduled
                if decode
                else [ScheduledSequence(sequence, num_tokens) for sequence, num_tokens in work]
            )
        else:
            scheduled, decode = speculator.add_drafts(work, self._options.step_tokens), None
        decode_rows = decode.rows if decode else None
        if self.cache.states is not None:
            scheduled = limit_drafts(scheduled, self.cache.states)
        batch, rows, scheduled = build_batch(scheduled, self.cache, model.config.first_attention, decode_rows)
        if self.cache.states is not None:
            batch = replace(batch, states=plan_states(scheduled, self.cache.states))
        if previous is not None:
            batch = _take_unread(batch, scheduled, decode, previous)
        needs_all_rows = speculator is not None and speculator.needs_all_hidden_states
        read = None if needs_all_rows or decode else rows_needed(scheduled)
        layers = model.probed_layers(sequence for sequence, *_ in scheduled)
        if speculator is not None:
            layers |= speculator.observed_layers
        hidden = forward(batch, rows, read, layers)
        probe = model.create_probe_reader(forward.kept, hidden, read, scheduled)
        results = sample_and_score(
            scheduled,
            hidden=hidden,
            rows=read,
            model=model.decoder,
            sampler=self.sampler,
            fused_sampler=forward.fused_sampler,
            probe=probe,
            plan=decode.samples if decode else None,
        )
        self._decode = decode
        return Step(
            work=work,
            scheduled=scheduled,
            decode=decode,
            results=results,
            probe=probe,
            hidden=None if speculator is None else hidden,
            kept=forward.kept,
            event=record_event(self.device_config.device),
            is_synchronous=speculator is not None or not self.device_config.uses_gpu_kernels,
        )

    def _commit(self, step: Step, now: float) -> None:
        """Count the scheduled tokens of a launched step as computed; draft tokens are not yet."""
        if self.cache.states is not None:
            sequences = [sequence for sequence, *_ in step.scheduled]
            step.states = dict(zip(sequences, self.cache.states.commit(), strict=True))
        for sequence, num_tokens, _ in step.scheduled:
            if sequence.started_at is None:
                self._timings.record_start(sequence, now)
            completes_prefix = self._advance(sequence, num_tokens)
            if step.states:
                self._keep_snapshots(sequence, step.states[sequence])
            if isinstance(sequence, ScoreSequence):
                step.num_scored += num_tokens
                if completes_prefix:
                    step.completed.append(sequence)
            elif completes_prefix and isinstance(sequence, GenerateSequence) and not sequence.branch.max_tokens:
                step.completed.append(sequence)

    def _advance(self, sequence: Sequence, num_tokens: int) -> bool:
        """Count more tokens as computed and share full pages; return True if they complete the sequence's prefix."""
        page_size = self.cache.page_size
        before, sequence.num_computed = sequence.num_computed, sequence.num_computed + num_tokens
        completes_prefix = before < sequence.num_prefix_tokens <= sequence.num_computed
        num_sharable = sequence.num_sharable
        is_full = completes_prefix or num_sharable // page_size > before // page_size
        # A page that an unread token fills is shared when that is read (``_append_part``).
        if is_full and sequence.tokens[num_sharable - 1] != PENDING_TOKEN:
            keys = sequence.cache_keys
            self.cache.publish(sequence.pages, keys, num_sharable, include_partial=completes_prefix)
        return completes_prefix

    def _keep_snapshots(self, sequence: Sequence, work: StateWork) -> None:
        """Keep the snapshots that a step made of a sequence's state, and its state after the step if it is wanted."""
        if work.snapshots:
            self.cache.keep_snapshots(sequence.pages, sequence.cache_keys, work.snapshots)
        self._keep_wanted_state(sequence, work.state)

    def _keep_wanted_state(self, sequence: Sequence, state: SequenceState) -> None:
        """Keep a sequence's present state as a snapshot, if it is wanted and its tokens are published."""
        if self.cache.states is not None and self.cache.states.wants_snapshot(state):
            self.cache.keep_state(sequence.pages, sequence.cache_keys)

    def _append_unread(self, step: Step) -> None:
        """Append an unread token to each sampled branch that it does not end by its count."""
        context = self.model.info.context
        for sequence, *_ in [] if step.results.plan is None else step.results.plan.requests:
            length = len(sequence.tokens) + 1
            if length < sequence.max_len and length < context:
                sequence.tokens.append(PENDING_TOKEN)

    # Read.

    def read(self, step: Step) -> list[SampledTokens]:
        """Wait for a step, set its scores and verify its drafts; return what was sampled for each branch.

        Branches that have ended since the launch are left out.
        """
        step.event.synchronize()
        self._measure(step)
        sampled = [one for one in step.results.read() if one.sequence.table is not None]
        self.num_scored += step.num_scored
        step.accepted = {one.sequence: find_accepted(one.draft, one.tokens) for one in sampled if one.draft.tokens}
        self._move_accepted(step.accepted)
        return sampled

    def _measure(self, step: Step) -> None:
        """Note the seconds of a step that is done: from its launch, or from the end of the step before it."""
        now = time.perf_counter()
        num_tokens = sum(count for _, count in step.work)
        if num_tokens > len(step.work):  # else it only decodes
            self.costs.add_step(num_tokens, now - max(step.launched_at, self._last_step_end))
        self._last_step_end = now

    def _move_accepted(self, accepted: Mapping[Sequence, tuple[int, ...]]) -> None:
        """Move the keys and values of a tree's accepted path to the slots of its tokens in the sequence."""
        moves = [
            (sequence.pages, sequence.num_computed + index, sequence.num_computed + depth)
            for sequence, path in accepted.items()
            if path and path[-1] != len(path) - 1  # else it is the beginning of the draft
            for depth, index in enumerate(path)
            if index != depth
        ]
        if moves:
            self.cache.move_tokens(moves)

    def append(self, step: Step, samples: SampledTokens) -> Finish | None:
        """Append to a branch its next token and, after each accepted draft token, the one sampled there.

        Returns why the branch ends with the last token that it received; ``None`` if it continues. Raises
        ``LogitsNotFinite`` if one of the tokens could not be sampled.
        """
        sequence = samples.sequence
        path, num_accepted_before = step.accepted.get(sequence), sequence.num_accepted
        sequence.num_drafted += len(samples.draft.tokens)
        finish: Finish | None = None
        for indices in split_at_possible_stops(sequence, samples.tokens, path) if path else _NO_ACCEPTED:
            finish = self._append_part(samples, indices)
            if path and self.cache.states is not None:
                self.cache.states.accept(step.states[sequence], path[: sequence.num_accepted - num_accepted_before])
            if finish is not None:
                if sequence.is_probed and step.probe is not None:
                    sequence.probe_score = step.probe.read(samples.row + indices[-1])
                drop_last_computed(sequence)
                break
        if path is not None:
            accepted = path[: sequence.num_accepted - num_accepted_before]
            step.outcomes.append(DraftOutcome(sequence, samples.draft, accepted))
        return finish

    def _append_part(self, samples: SampledTokens, indices: abc.Sequence[int]) -> Finish | None:
        """Append some of the sampled tokens, of which those before the last are accepted draft tokens.

        Only the last of them can end the branch; returns why it does, or ``None``.
        """
        sequence = samples.sequence
        require_finite_logits(all(samples.tokens[index] >= 0 for index in indices))
        for index in indices:
            detail = samples.details[index] if samples.details else None
            sequence.append(samples.tokens[index], samples.logprobs[index], detail)
        num_accepted = sequence.num_read - 1 - sequence.num_computed
        if num_accepted > 0:
            sequence.num_accepted += num_accepted
            self._advance(sequence, num_accepted)
        self.num_generated += len(indices)
        finish = find_finish(sequence, samples.tokens[indices[-1]], self.model.info.context)
        # Less than none: the next step is in flight and computes keys and values of the last token.
        is_page_end = sequence.drops is None and sequence.num_read % self.cache.page_size == 0
        if finish is None and num_accepted < 0 and is_page_end:
            self.cache.publish(sequence.pages, sequence.cache_keys, sequence.num_read, include_partial=False)
            state = sequence.pages.state
            if state is not None and state.num_tokens == sequence.num_read:
                self._keep_wanted_state(sequence, state)
        return finish

    def report_outcomes(self, step: Step) -> None:
        """Report a step that was read to the speculation, unless it skipped the step, and release its drafts."""
        if self.cache.states is not None:
            for work in step.states.values():
                self.cache.states.release_drafts(work)
                # The step in flight, if there is one, follows the tokens that were read now.
                self.cache.states.release_previous(work.state)
        if self.speculator is not None and step.hidden is not None:
            self.speculator.update(step.scheduled, step.outcomes, hidden=step.hidden, kept=step.kept)


def drop_last_computed(sequence: GenerateSequence) -> None:
    """Forget the step in flight of a branch that ends with its last token."""
    sequence.drop_unread()
    sequence.num_computed = sequence.num_read - 1


def _take_unread(
    batch: Batch, scheduled: abc.Sequence[ScheduledSequence], decode: DecodeBatch | None, previous: Step
) -> Batch:
    """Return a batch that takes its unread tokens from the step in flight."""
    plan, sampled = previous.results.plan, previous.results.tokens_gpu
    if plan is None or sampled is None:
        return batch
    if decode is not None and decode is previous.decode:
        return replace(batch, unread=UnreadTokens(sampled))
    # Sequences with one new token come first in a batch, so a row is also the index of its sequence.
    rows = np.flatnonzero(batch.tokens.numpy() == PENDING_TOKEN).tolist()
    if not rows:
        return batch
    sources: dict[Sequence, int] = {request.sequence: index for index, request in enumerate(plan.requests)}
    indices = [sources[scheduled[row].sequence] for row in rows]
    return replace(batch, unread=UnreadTokens(sampled, (rows, indices)))


def split_at_possible_stops(
    sequence: GenerateSequence, tokens: abc.Sequence[int], path: abc.Sequence[int]
) -> list[list[int]]:
    """Return the indices of the sampled tokens that a branch receives, in parts that only their last token can end.

    ``tokens``: all sampled tokens; ``path``: the accepted draft tokens. No draft token is a stop token, and there is
    room for the token after them, so only a stop string can end the branch before that one.
    """
    indices, stops = [0, *(index + 1 for index in path)], sequence.stop_strings
    if stops is None or not any(stops.may_end(tokens[index]) for index in indices):
        return [indices]
    return [[index] for index in indices]


def find_finish(sequence: GenerateSequence, token: int, context: int) -> Finish | None:
    """Return why the branch ends with its latest ``token``; ``None`` if it continues."""
    if token in sequence.stop_tokens:
        return "stop", token
    stops = sequence.stop_strings
    if stops is not None and len(sequence.generated) <= sequence.sampling.min_tokens:
        sequence.reader.advance()
        sequence.num_chars_searched = max(sequence.num_chars_searched, len(sequence.reader.text))
    elif stops is not None and stops.may_end(token):
        sequence.reader.advance()
        if token in stops.special:
            return "stop", stops.special[token]
        stop = stops.find(sequence.reader.text, sequence.num_chars_searched)
        if stop is not None:
            return "stop", stop
        sequence.num_chars_searched = max(sequence.num_chars_searched, len(sequence.reader.text))
    if len(sequence.generated) - len(sequence.branch.generated) >= sequence.branch.max_tokens:
        return "length", None
    if len(sequence.tokens) >= context:
        return "context", None
    return None
