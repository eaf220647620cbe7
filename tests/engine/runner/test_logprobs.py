"""Reported log-probabilities equal transformers' log_softmax, however the tokens were computed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, Delta, InvalidRequest, TokenLogprob
from engine.scheduler.sequence import GenerateSequence
from tests.closeness import log_sum_bound
from tests.engine.conftest import Checkpoints
from tests.engine.exact import exact_logits, float32_loss
from tests.engine.helpers import SMALL, Harness, generate
from tests.engine.ties import assert_same_tokens
from tests.seeds import shift

PROMPT = tuple(random.Random(shift(0)).randrange(3, 360) for _ in range(90))


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3")


def check(folder: Path, before: Sequence[int], found: Sequence[TokenLogprob], count: int) -> None:
    """Check the log-probabilities of tokens after ``before``, and the ``count`` likeliest, against transformers."""
    tokens = [one.token_id for one in found]
    law = exact_logits(folder, [*before, *tokens])[len(before) - 1 : -1].log_softmax(dim=-1).numpy()
    loss = float32_loss(folder).logprob
    np.testing.assert_allclose([one.logprob for one in found], law[np.arange(len(tokens)), tokens], atol=loss, rtol=0)
    for row, one in zip(law, found, strict=True):
        assert len(one.top) == count
        ids = [token for token, _ in one.top]
        np.testing.assert_allclose([logprob for _, logprob in one.top], row[ids], atol=loss, rtol=0)
        np.testing.assert_allclose(row[ids], np.sort(row)[::-1][:count], atol=2 * loss, rtol=0)


def inside(values: Sequence[TokenLogprob | None] | None) -> list[TokenLogprob]:
    """Return the log-probabilities of a prompt without its first token, which has none."""
    assert values is not None
    assert values[0] is None
    return [value for value in values[1:] if value is not None]


def test_log_probabilities_do_not_depend_on_sampling_parameters(folder: Path) -> None:
    law = {"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.2, "logit_bias": ((5, 3.0),), "ignore_eos": True}
    harness = Harness(folder)
    plain = harness.submit(generate(PROMPT, [Branch(7, 7, 20)], ignore_eos=True))
    answers = harness.complete(generate(PROMPT, [Branch(1, key, 20) for key in range(3)], logprobs=4, **law))
    for answer in answers:
        assert answer.logprobs is not None
        assert [one.token_id for one in answer.logprobs] == list(answer.token_ids)
        check(folder, PROMPT, answer.logprobs, 4)
    silent = harness.complete(generate(PROMPT, [Branch(1, key, 20) for key in range(3)], **law))
    assert [one.token_ids for one in silent] == [one.token_ids for one in answers]
    assert silent[0].logprobs is None
    assert [event.logprobs for event in plain if isinstance(event, Completion)] == [None]


def test_requests_with_different_numbers_of_alternatives_share_a_batch(folder: Path) -> None:
    harness = Harness(folder)
    counts = (0, 20, 1)
    events = [
        harness.submit(generate(PROMPT, [Branch(1, key, 6)], logprobs=count, ignore_eos=True))
        for key, count in enumerate(counts)
    ]
    harness.run()
    for count, heard in zip(counts, events, strict=True):
        [answer] = [event for event in heard if isinstance(event, Completion)]
        check(folder, PROMPT, answer.logprobs or (), count)


def test_at_temperature_one_they_sum_to_the_sampled_log_probability(folder: Path) -> None:
    """Both sum the logarithms of twenty tokens' softmax, computed in two ways."""
    [answer] = Harness(folder).complete(generate(PROMPT, [Branch(1, 1, 20)], logprobs=0, ignore_eos=True))
    bound = 2 * 20 * log_sum_bound(400)
    assert sum(one.logprob for one in answer.logprobs or ()) == pytest.approx(answer.logprob, abs=bound)


def test_deltas_carry_the_log_probabilities_of_their_tokens(folder: Path) -> None:
    harness = Harness(folder)
    events = harness.submit(generate(PROMPT, [Branch(1, 1, 40)], logprobs=2, ignore_eos=True), stream=True)
    harness.run()
    deltas = [event for event in events if isinstance(event, Delta)]
    assert len(deltas) > 3
    for delta in deltas:
        assert tuple(one.token_id for one in delta.logprobs or ()) == delta.token_ids
    [answer] = [event for event in events if isinstance(event, Completion)]
    assert tuple(one for delta in deltas for one in delta.logprobs or ()) == answer.logprobs


@pytest.mark.parametrize("step", [512, 16, 1])
def test_prompt_logprobs_do_not_depend_on_chunk_size(folder: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only a few of a step's positions are in memory at once."""
    monkeypatch.setattr("engine.runner.logprobs._MAX_LOGITS", 7 * 400)
    harness = Harness(folder, EngineOptions(kv_tokens=4096, max_running=32, step_tokens=step))
    [answer] = harness.complete(generate(PROMPT, [Branch(1, 1, 3)], prompt_logprobs=3, ignore_eos=True))
    found = inside(answer.prompt_logprobs)
    assert [one.token_id for one in found] == list(PROMPT[1:])
    check(folder, PROMPT[:1], found, 3)
    request = generate(PROMPT, [Branch(1, 1, 3)], ignore_eos=True)
    [plain] = Harness(folder).complete(request)
    assert_same_tokens(folder, [request], [answer.token_ids], [plain.token_ids])


def test_prompt_logprobs_of_a_cached_prompt_recompute_it(folder: Path) -> None:
    harness = Harness(folder)
    [first] = harness.complete(generate(PROMPT, [Branch(1, 1, 5)], ignore_eos=True))
    asking = generate(PROMPT, [Branch(1, key, 5) for key in (1, 2)], prompt_logprobs=0, ignore_eos=True)
    second, sibling = harness.complete(asking)
    assert (second.cached_tokens, sibling.cached_tokens) == (0, len(PROMPT) - 1)
    assert_same_tokens(folder, [asking], [second.token_ids, ()], [first.token_ids, ()])
    check(folder, PROMPT[:1], inside(second.prompt_logprobs), 0)
    assert sibling.prompt_logprobs is None
    [third] = harness.complete(generate(PROMPT, [Branch(1, 1, 5)], ignore_eos=True))
    assert third.cached_tokens == len(PROMPT) - 1


def test_prompt_logprobs_exclude_generated_tokens(folder: Path) -> None:
    branch = Branch(1, 1, 2, generated=(8, 9, 10))
    [answer] = Harness(folder).complete(generate(PROMPT, [branch], prompt_logprobs=1, ignore_eos=True))
    assert len(answer.prompt_logprobs or ()) == len(PROMPT)
    check(folder, PROMPT[:1], inside(answer.prompt_logprobs), 1)


def test_prompt_logprobs_continue_after_a_preemption(folder: Path) -> None:
    harness = Harness(folder, EngineOptions(kv_tokens=256, max_running=8, step_tokens=6))
    others = [Branch(3, key, 70) for key in range(3)]
    harness.submit(generate(PROMPT[:20], others, ignore_eos=True))
    for _ in range(30):
        harness.core.step()
    events = harness.submit(generate(PROMPT, [Branch(1, 1, 3)], prompt_logprobs=2, logprobs=2, ignore_eos=True))
    [sequence] = harness.core._requests[-1].sequences
    lost_at = 0
    while harness.core.has_work:
        ran = sequence.table is not None
        harness.core.step()
        harness.core.cache.check()
        if ran and sequence.table is None and not events:
            assert isinstance(sequence, GenerateSequence)
            lost_at = len(sequence.prompt_logprobs or ())
    assert 1 < lost_at < len(PROMPT)
    [answer] = [event for event in events if isinstance(event, Completion)]
    check(folder, PROMPT[:1], inside(answer.prompt_logprobs), 2)
    check(folder, PROMPT, answer.logprobs or (), 2)


def test_prompt_logprobs_need_no_generated_tokens(folder: Path) -> None:
    harness = Harness(folder)
    full = [random.Random(shift(1)).randrange(3, 360) for _ in range(256)]
    for prompt in (PROMPT, (5,), full):
        [answer] = harness.complete(generate(prompt, [Branch(1, 1, 0)], prompt_logprobs=1))
        assert (answer.token_ids, answer.text, answer.finish_reason) == ((), "", "length")
        found = inside(answer.prompt_logprobs)
        assert len(found) == len(prompt) - 1
        if found:
            check(folder, prompt[:1], found, 1)
    assert harness.core.stats.generated_tokens == 0
    with pytest.raises(InvalidRequest, match="at least 1"):
        harness.submit(generate(PROMPT, [Branch(1, 1, 0)]))


def test_an_aborted_branch_reports_its_logprobs_so_far(folder: Path) -> None:
    harness = Harness(folder, EngineOptions(kv_tokens=SMALL.kv_tokens, max_running=4, step_tokens=20))
    events = harness.submit(generate(PROMPT, [Branch(1, 1, 3)], prompt_logprobs=0))
    harness.core.step()
    harness.core.cancel(lambda _: True)
    [answer] = [event for event in events if isinstance(event, Completion)]
    assert len(answer.prompt_logprobs or ()) == 21
