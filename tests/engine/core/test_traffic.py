"""Random traffic with every drafter: requests that stream, are cut, aborted and preempted have unchanged tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.cache.paged_kv import KVCache
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, GenerateRequest, ScoreItem, ScoreResult
from engine.scheduler.draft import Draft
from engine.scheduler.sequence import Event, GenerateSequence
from engine.speculation.control.adaptive import AdaptiveController
from engine.speculation.control.controller import DraftOutcome, StepCost
from engine.speculation.drafter import Drafter, DraftRequest, StepResult
from engine.speculation.drafters.draft_model import DraftModel
from engine.speculation.load import load_drafter
from tests.engine.conftest import Checkpoints
from tests.engine.exact import float32_loss
from tests.engine.helpers import Harness, generate, score
from tests.engine.speculation.dflash_heads import dflash_parts
from tests.engine.speculation.eagle3_heads import eagle3_parts
from tests.engine.speculation.heads import eagle_parts, medusa_parts, save_head
from tests.engine.ties import count_same_tokens
from tests.long import mostly_long
from tests.seeds import shift

LAW = {"temperature": 1.1, "top_k": 50, "ignore_eos": True}
PROMPTS = [random.Random(shift(length)).choices(range(3, 360), k=length) for length in (3, 18, 33, 60)]
PIN_KEYS, SALTS = (None, "a", "b"), (None, None, "salt")
PROMPTS += [PROMPTS[2][:20] + PROMPTS[3][:20]]

Action = tuple[str, int, int, int]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["generate", "generate", "cut", "score", "step", "step", "abort", "release", "prune", "clear"]),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(1, 5),
        st.integers(1, 30),
    ),
    min_size=3,
    max_size=14,
)


class Prompted:
    """A drafter with some true next tokens in its drafts, which records the branches not yet released."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.kind, self.key_shapes = drafter.kind, drafter.key_shapes
        self.hidden_state_needs, self.observed_layers = drafter.hidden_state_needs, drafter.observed_layers
        self._random = random.Random(shift(0))
        self.known: set[GenerateSequence] = set()
        self.right: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        """Tokens that branches generate, by key and prompt."""

    def reset(self, cache: KVCache) -> None:
        self.known.clear()
        self._drafter.reset(cache)

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        self.known.update(wish.sequence for wish in wishes)
        drafts = self._drafter.propose(wishes)
        return [self._told(wish, draft) for wish, draft in zip(wishes, drafts, strict=True)]

    def _told(self, wish: DraftRequest, draft: Draft) -> Draft:
        """Replace a draft token of each depth by the true one; in a tree, add another draft token before all."""
        if wish.nodes > max(wish.depth, len(draft)) and draft:
            parents = (-1, *(parent + 1 if parent >= 0 else -1 for parent in draft.parents))
            draft = Draft((3, *draft.tokens), parents, (draft.probs[0], *draft.probs))
        sequence = wish.sequence
        written = len(sequence.generated)
        text = self.right[sequence.key, tuple(sequence.tokens[: len(sequence.tokens) - written])]
        tokens, depths = list(draft.tokens), draft.depths
        for depth in set(depths):
            place = self._random.choice([place for place, other in enumerate(depths) if other == depth])
            if self._random.random() < 0.7 and written + depth <= len(text):
                tokens[place] = text[written + depth - 1]
        return replace(draft, tokens=tuple(tokens))

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        self.known.update(step.sequence for step in steps)
        self._drafter.observe_step(steps, hidden)

    def release(self, sequence: GenerateSequence) -> None:
        self.known.discard(sequence)
        self._drafter.release(sequence)

    def warm_ups(self) -> list[Callable[[], None]]:
        return []

    def clear_cache(self) -> None:
        self._drafter.clear_cache()

    def check(self) -> None:
        if isinstance(self._drafter, DraftModel):
            self._drafter.cache.check()
            assert self.known or not self._drafter.cache.num_tables


class Timed(AdaptiveController):
    """A controller with a simulated clock, on which drafts save time only at times. Every other step may have trees."""

    steps = 0

    def choose_sizes(
        self, sequences: Sequence[GenerateSequence], others: int, rested: int, /
    ) -> Sequence[tuple[int, int]]:
        self.steps += 1
        spare = self.steps % 2
        return [(depth, (1 + spare) * depth + spare) for depth, _ in super().choose_sizes(sequences, others, rested)]

    def update(self, outcomes: Sequence[DraftOutcome], cost: StepCost, /) -> int:
        per_token = 1e-2 if self.steps % 400 > 300 else 1e-5
        return super().update(
            outcomes, cost._replace(drafting_seconds=1e-4, other_seconds=1e-2 + per_token * cost.num_tokens)
        )


def drafter_of(kind: str, folder: Path, draft: Path, heads: Path, harness: Harness) -> Prompted:
    parts = {"medusa": medusa_parts, "eagle": eagle_parts, "eagle3": eagle3_parts, "dflash": dflash_parts}
    where = {"draft_model": f"={draft}", "ngram": ""}
    wanted = kind + (where[kind] if kind in where else f"={save_head(heads, *parts[kind]())}")
    model = harness.core.model
    drafter = load_drafter(wanted, folder, model.decoder, context=model.info.context)
    assert drafter is not None
    return Prompted(drafter)


@pytest.mark.parametrize(
    "kind", mostly_long(["off", "ngram", "draft_model", "medusa", "eagle", "eagle3", "dflash"], every=3)
)
def test_random_traffic_on_a_small_pool_changes_no_tokens(checkpoints: Checkpoints, tmp_path: Path, kind: str) -> None:
    folder = checkpoints("qwen3")
    quiet, loss = Harness(folder), 2 * float32_loss(folder).logit

    @cache
    def alone(prompt: int, key: int) -> tuple[int, ...]:
        [completion] = quiet.complete(generate(PROMPTS[prompt], [Branch(5, key, 30)], **LAW))
        return completion.token_ids

    @cache
    def read(prompt: int) -> float:
        [result] = quiet.score(score(ScoreItem((tuple(PROMPTS[prompt]),), (0,)), token_ids=(7,)))
        assert result.values is not None
        return result.values[0][0]

    # 160 slots hold the longest branch and little else, so preemption and eviction are frequent.
    options = EngineOptions(kv_tokens=160, page_size=8, max_running=6, step_tokens=24, lease_seconds=4.0)
    busy = Harness(folder, options)
    drafter, controller = None, Timed(6, 12)
    if kind != "off":
        drafter = drafter_of(kind, folder, checkpoints("llama"), tmp_path, busy)
        drafter.right = {
            (key, tuple(prompt)): alone(number, key) for number, prompt in enumerate(PROMPTS) for key in range(5)
        }
        busy.core.start_speculation(drafter, controller)
    clock = itertools.count()
    busy.core.cache.pins._clock = lambda: 0.1 * next(clock)

    pinned_counts: set[int] = set()

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(ACTIONS)
    def traffic(actions: list[Action]) -> None:
        sent: list[tuple[GenerateRequest | None, int, list[Event]]] = []
        aborted: set[str] = set()
        for number, (what, prompt, count, length) in enumerate(actions):
            if what in ("generate", "cut"):
                cut = length // 2 if what == "cut" else 0
                branches = [Branch(5, key, length - cut, alone(prompt, key)[:cut]) for key in range(count)]
                request = generate(
                    PROMPTS[prompt],
                    branches,
                    request_id=str(number),
                    priority=length % 3,
                    pin_key=PIN_KEYS[length % 3],
                    cache_salt=SALTS[count % 3],
                    **LAW,
                )
                sent.append((request, prompt, busy.submit(request, stream=length % 2 == 0)))
            elif what == "score":
                item = ScoreItem((tuple(PROMPTS[prompt]),), (0,))
                sent.append((None, prompt, busy.submit(score(*[item] * count, token_ids=(7,), pin_key="a"))))
            elif what == "abort":
                aborted.add(str(number - count))
                busy.core.cancel(lambda job, name=str(number - count): job.request_id == name)
            elif what == "release":
                busy.core.release("a" if count % 2 else "b")
            elif what == "prune":
                busy.core.release("a" if count % 2 else "b", (*PROMPTS[prompt], *alone(prompt, 0)[:length]))
            elif what == "clear":
                busy.core.clear_cache()
            for _ in range(count if what == "step" else 0):
                busy.core.step()
                pinned_counts.add(busy.core.stats.pins)
                busy.core.check_invariants()
                if drafter is not None:
                    drafter.check()
        busy.run()
        assert busy.core.cache.num_available_pages == busy.core.cache.pool.size
        if drafter is not None:
            assert not drafter.known
            drafter.check()
        for request, prompt, events in sent:
            if request is None:
                scored = [event for event in events if isinstance(event, ScoreResult) and event.values]
                assert all(abs(event.values[0][0] - read(prompt)) < loss for event in scored if event.values)
                continue
            completions = {event.index: event for event in events if isinstance(event, Completion)}
            assert sorted(completions) == list(range(len(request.branches)))
            for index, completion in completions.items():
                cut = len(request.branches[index].generated)
                expected = alone(prompt, index)[cut : cut + len(completion.token_ids)]
                branch = request.branches[index]
                count_same_tokens(folder, request, branch, completion.token_ids, expected)
                whole = len(completion.token_ids) == request.branches[index].max_tokens
                assert whole or request.request_id in aborted

    traffic()
    stats = busy.core.stats
    assert (stats.accepted_tokens > 0.05 * stats.generated_tokens) == (kind != "off")
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert any(pinned_counts)
