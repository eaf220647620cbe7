"""Random traffic: requests come, stream, are cut, aborted and preempted, and nothing changes anybody's tokens."""

from __future__ import annotations

import itertools
import random
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import CoreOptions
from engine.sequence import Event
from engine.types import Branch, Completion, GenerateRequest, ScoreItem, ScoreResult
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate, score

LAW = {"temperature": 1.1, "top_k": 50, "ignore_eos": True}
PROMPTS = [random.Random(length).choices(range(3, 360), k=length) for length in (3, 18, 33, 60)]
LEASES, SALTS = (None, "a", "b"), (None, None, "salt")
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


def test_random_traffic_on_a_small_pool_gives_everybody_their_own_tokens(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3")
    quiet = Harness(folder)

    @cache
    def alone(prompt: int, key: int) -> tuple[int, ...]:
        [completion] = quiet.complete(generate(PROMPTS[prompt], [Branch(5, key, 30)], **LAW))
        return completion.token_ids

    @cache
    def read(prompt: int) -> float:
        [result] = quiet.score(score(ScoreItem((tuple(PROMPTS[prompt]),), (0,)), token_ids=(7,)))
        assert result.values is not None
        return result.values[0][0]

    # 160 slots hold the longest branch and little else, so preemption and eviction are the rule.
    options = CoreOptions(kv_tokens=160, page_size=8, max_running=6, step_tokens=24, lease_seconds=4.0)
    busy = Harness(folder, options)
    clock = itertools.count()
    busy.core.cache.leases._clock = lambda: 0.1 * next(clock)

    leased: set[int] = set()

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
                    lease=LEASES[length % 3],
                    cache_salt=SALTS[count % 3],
                    **LAW,
                )
                sent.append((request, prompt, busy.submit(request, stream=length % 2 == 0)))
            elif what == "score":
                item = ScoreItem((tuple(PROMPTS[prompt]),), (0,))
                sent.append((None, prompt, busy.submit(score(*[item] * count, token_ids=(7,), lease="a"))))
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
                leased.add(busy.core.stats.leases)
                busy.core.check()
        busy.run()
        assert busy.core.cache.available == busy.core.cache.pool.size
        for request, prompt, events in sent:
            if request is None:
                scored = [event for event in events if isinstance(event, ScoreResult) and event.values]
                assert all(abs(event.values[0][0] - read(prompt)) < 1e-4 for event in scored if event.values)
                continue
            completions = {event.index: event for event in events if isinstance(event, Completion)}
            assert sorted(completions) == list(range(len(request.branches)))
            for index, completion in completions.items():
                cut = len(request.branches[index].generated)
                expected = alone(prompt, index)[cut : cut + len(completion.token_ids)]
                assert completion.token_ids == expected
                whole = len(completion.token_ids) == request.branches[index].max_tokens
                assert whole or request.request_id in aborted

    traffic()
    assert busy.core.stats.preemptions > 0
    assert busy.core.stats.cached_tokens > 0
    assert max(leased) > 1
