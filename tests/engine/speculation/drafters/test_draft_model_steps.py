"""Draft models: steps of branches that catch up, draft, wait and end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

import pytest

from engine.models.load import load_model
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, GenerateRequest
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import GenerateSequence, Request
from engine.speculation.control.controller import FixedController
from engine.speculation.drafter import DraftRequest
from engine.speculation.drafters.draft_model import DraftModel
from tests.engine.conftest import Checkpoints
from tests.engine.exact import float32_loss
from tests.engine.helpers import Harness, generate
from tests.engine.speculation.drafters.draft_models import (
    LAW,
    PROMPT,
    Counted,
    cached,
    complete,
    speculating,
)
from tests.seeds import shift


def branches(harness: Harness, *asked: GenerateRequest) -> list[GenerateSequence]:
    sequences: list[GenerateSequence] = []
    for request in asked:
        in_flight = Request(request.request_id, lambda _: None, namespace=request.cache_salt)
        harness.core.model.add_branches(request, in_flight)
        sequences += [one for one in in_flight.sequences if isinstance(one, GenerateSequence)]
    return sequences


def propose(drafter: DraftModel, sequences: Sequence[GenerateSequence], depth: int = 3, nodes: int = 3) -> list[Draft]:
    drafts = drafter.propose([DraftRequest(one, depth, nodes) for one in sequences])
    drafter.cache.check()
    return drafts


def passes(drafter: DraftModel) -> list[int]:
    model = drafter._model
    assert isinstance(model, Counted)
    taken, model.passes = model.passes, []
    return taken


def test_a_long_prompt_is_prefilled_in_chunks_while_others_get_drafts(checkpoints: Checkpoints) -> None:
    harness, drafter = speculating(checkpoints("qwen3"), checkpoints("llama"), catch_up=32)
    quick, slow = branches(
        harness, *(generate(prompt, [Branch(1, 1, 9)], **LAW) for prompt in (PROMPT[:9], PROMPT[::-1]))
    )
    for step in range(5):
        drafts = propose(drafter, [slow, quick])
        assert len(drafts[1]) == 3
        # 70 tokens: 32, 32, and less than a page.
        assert (drafts[0] == EMPTY_DRAFT) == (step < 2)
        assert max(passes(drafter)) <= 32 + 9
        quick.tokens.append(step)


def test_siblings_wait_for_the_first_to_compute_their_shared_prefix(checkpoints: Checkpoints) -> None:
    harness, drafter = speculating(checkpoints("qwen3"), checkpoints("llama"))
    asked = generate(PROMPT, [Branch(1, key, 9) for key in range(8)], **LAW)
    siblings = branches(harness, asked)
    for key, one in enumerate(siblings):
        one.tokens.append(key)
    drafts = propose(drafter, siblings)
    assert [len(draft) for draft in drafts] == [3, *[0] * 7]
    assert passes(drafter) == [71, 1, 1]
    drafts = propose(drafter, siblings)
    assert [len(draft) for draft in drafts] == [3] * 8
    # Each but the first computes the tokens after the prompt's last full page.
    assert sum(passes(drafter)[:1]) <= 1 + 7 * (71 - 64)
    for one in siblings:
        drafter.release(one)
    # A later request hits the cache up to the last token; one of another namespace does not.
    again, *_, stranger = branches(harness, asked, generate(PROMPT, [Branch(1, 1, 9)], cache_salt="x", **LAW))
    again.tokens.append(3)
    propose(drafter, [again], depth=1, nodes=1)
    assert passes(drafter) == [1]
    propose(drafter, [stranger], depth=1, nodes=1)
    assert passes(drafter) == [70]


def test_two_tokens_are_computed_after_full_acceptance_and_one_after_none(checkpoints: Checkpoints) -> None:
    harness, drafter = speculating(checkpoints("qwen3"), checkpoints("llama"))
    [one] = branches(harness, generate(PROMPT[:20], [Branch(1, 1, 90)], **LAW))
    [draft] = propose(drafter, [one])
    one.tokens += [*draft.tokens, 5]
    passes(drafter)
    [draft] = propose(drafter, [one])
    assert passes(drafter) == [2, 1, 1]
    one.tokens += [draft.tokens[0] + 1]
    [draft] = propose(drafter, [one])
    assert passes(drafter) == [1, 1, 1]
    one.tokens += [*draft.tokens[:2], draft.tokens[2] + 1]
    # Draft tokens beyond the controller's cut may equal the samples too: the last token is still computed.
    [draft] = propose(drafter, [one])
    one.tokens += [*draft.tokens[:1], draft.tokens[1]]
    passes(drafter)
    [draft] = propose(drafter, [one])
    assert passes(drafter) == [1, 1, 1]


def test_a_draft_is_a_function_of_the_branch_alone(checkpoints: Checkpoints) -> None:
    harness, drafter = speculating(checkpoints("qwen3"), checkpoints("llama"))
    rng = random.Random(shift(3))
    one, other = branches(harness, generate(PROMPT[:20], [Branch(1, key, 90) for key in range(2)], **LAW))
    bound = 4 * float32_loss(checkpoints("llama")).logit  # a share of exponentials, in two runs
    for _ in range(25):
        drafts = propose(drafter, [one, other], depth=4, nodes=rng.randint(4, 9))
        fresh = speculating(checkpoints("qwen3"), checkpoints("llama"))[1]
        nodes = len(drafts[0])
        [expected] = propose(fresh, [one], depth=4, nodes=max(4, nodes))
        assert drafts[0].tokens == expected.tokens
        assert drafts[0].probs == pytest.approx(expected.probs, rel=bound)
        for sequence, draft in zip((one, other), drafts, strict=True):
            # A runner-up may have been accepted, with the token sampled after it.
            right, others = rng.randint(0, 4), rng.randint(1, 2)
            sequence.tokens += [*draft.tokens[:right], *rng.choices(range(400), k=others)]
    assert len(one.tokens) > 70


def test_trees_are_the_chain_with_the_likeliest_runners_up(checkpoints: Checkpoints) -> None:
    harness, drafter = speculating(checkpoints("qwen3"), checkpoints("llama"))
    [one] = branches(harness, generate(PROMPT[:20], [Branch(1, 1, 90)], temperature=1.0, ignore_eos=True))
    bound = 4 * float32_loss(checkpoints("llama")).logit  # a share of exponentials, in two runs
    [chain] = propose(drafter, [one], depth=3, nodes=3)
    [tree] = propose(drafter, [one], depth=3, nodes=8)
    assert chain.is_chain
    assert (tree.tokens[:3], tree.parents[:3]) == (chain.tokens, chain.parents)
    assert tree.probs[:3] == pytest.approx(chain.probs, rel=bound)
    assert len(tree) == 8
    assert max(tree.depths) == 3
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == 8
    reached = [1.0]
    for chance in chain.probs:
        reached.append(reached[-1] * chance)
    beside = [reached[parent + 1] * tree.probs[index] for index, parent in enumerate(tree.parents) if index > 2]
    assert beside == sorted(beside, reverse=True)
    [wide] = propose(drafter, [one], depth=3, nodes=40)
    left_out = [
        reached[parent + 1] * wide.probs[index]
        for index, parent in enumerate(wide.parents)
        if (parent, wide.tokens[index]) not in set(zip(tree.parents, tree.tokens, strict=True))
    ]
    assert max(left_out) <= min(beside)
    [other] = branches(harness, generate(PROMPT[:9], [Branch(1, 1, 9)]))
    both = drafter.propose([DraftRequest(one, 3, 3), DraftRequest(other, 3, 8)])
    assert [len(draft) for draft in both] == [3, 8]


def test_a_token_that_ends_the_branch_is_drafted_and_not_computed(checkpoints: Checkpoints) -> None:
    harness, drafter = speculating(checkpoints("qwen3"), checkpoints("llama"))
    free = generate(PROMPT[:20], [Branch(1, 1, 90)], **LAW)
    [draft] = propose(drafter, branches(harness, free), depth=6, nodes=6)
    assert len(set(draft.tokens)) > 3
    stopping = generate(PROMPT[:20], [Branch(1, 1, 90)], **LAW | {"stop_token_ids": (draft.tokens[2],)})
    place, ends = draft.tokens.index(draft.tokens[2]), frozenset({draft.tokens[2]})
    # Beside a branch with a requested tree, a chain stays a chain.
    one, other = branches(harness, stopping, free)
    stopped, tree = drafter.propose([DraftRequest(one, 6, 6), DraftRequest(other, 6, 12)])
    assert stopped.tokens == draft.tokens[: place + 1]
    assert draft.without(ends).tokens == stopped.without(ends).tokens == draft.tokens[:place]
    left = tree.without(ends)
    paths = {tuple(tree.path(index)) for index in range(len(tree))}
    assert {tuple(left.path(index)) for index in range(len(left))} == {path for path in paths if ends.isdisjoint(path)}


class Seeing(FixedController):
    """A controller that checks the drafts to be computed."""

    seen: ClassVar[list[Draft]] = []

    def trim(self, wishes: Sequence[DraftRequest], drafts: Sequence[Draft], /) -> list[Draft]:
        self.seen.extend(drafts)
        return super().trim(wishes, drafts)


def test_no_step_computes_a_draft_token_that_ends_the_branch(checkpoints: Checkpoints) -> None:
    harness, drafter = speculating(checkpoints("qwen3"), checkpoints("qwen3"))
    harness.core.start_speculation(drafter, Seeing(4, 4))
    ends = set(range(30, 46))
    # Each prompt's first token may be one of the 16 of 400 that end the branch.
    prompts = [random.Random(shift(key)).choices(range(3, 360), k=20) for key in range(8)]
    law = LAW | {"stop_token_ids": tuple(ends)}
    Seeing.seen.clear()
    complete(harness, drafter, [generate(prompt, [Branch(1, 1, 40)], **law) for prompt in prompts])
    assert Seeing.seen
    assert all(ends.isdisjoint(draft.tokens) for draft in Seeing.seen)


def test_no_step_computes_a_draft_token_that_is_a_stop_string(checkpoints: Checkpoints) -> None:
    harness, drafter = speculating(checkpoints("qwen3"), checkpoints("qwen3"))
    prompt = generate(PROMPT[:20], [Branch(1, 1, 40)], **LAW)
    tokenizer = harness.core.model.tokenizer
    [free] = harness.complete(prompt)
    texts = [(token, tokenizer.decode([token])) for token in free.token_ids]
    # The last new token, so that draft tokens precede it.
    last, stops = next(
        (text, {token})
        for place, (token, text) in reversed([*enumerate(texts)])
        if tokenizer.encode(text) == (token,) and token not in free.token_ids[:place]
    )
    Seeing.seen.clear()
    harness.core.start_speculation(drafter, Seeing(4, 4))
    complete(harness, drafter, [generate(PROMPT[:20], [Branch(1, 1, 40)], **LAW | {"stop": (last,)})])
    assert Seeing.seen
    assert all(stops.isdisjoint(draft.tokens) for draft in Seeing.seen)


def test_without_memory_a_branch_gets_no_draft_while_others_do(checkpoints: Checkpoints) -> None:
    pages = 7
    harness, drafter = speculating(checkpoints("qwen3"), checkpoints("llama"), pool_bytes=pages * 16 * 512)
    assert drafter.cache.pool.size == pages
    prompts = [random.Random(shift(key)).choices(range(3, 360), k=40) for key in range(4)]
    asked = branches(harness, *(generate(prompt, [Branch(1, 1, 90)], **LAW) for prompt in prompts))
    drafts = propose(drafter, asked)
    assert [len(draft) > 0 for draft in drafts] == [True, True, False, False]
    # The first outgrows the free memory and gets no draft; the third gets one once the first is not requested.
    asked[0].tokens += range(60)
    asked[1].tokens += range(30)
    drafts = propose(drafter, asked)
    assert sum(len(draft) > 0 for draft in drafts) == 1
    drafts = propose(drafter, asked[2:])
    assert [len(draft) > 0 for draft in drafts] == [True, True]
    for one in asked:
        drafter.release(one)
    assert drafter.cache.num_tables == 0


def test_branches_without_requests_free_their_rows_and_keep_their_cached_prefix(checkpoints: Checkpoints) -> None:
    options = EngineOptions(kv_tokens=4096, max_running=2)
    harness, drafter = speculating(checkpoints("qwen3"), checkpoints("llama"), options=options)
    asked = branches(harness, *(generate([key, *PROMPT], [Branch(1, 1, 90)], **LAW) for key in range(5)))
    for _ in range(3):
        for one in asked:
            [draft] = propose(drafter, [one])
            assert len(draft) == 3
            one.tokens.append(7)
    assert drafter.cache.num_tables == 2
    assert all(any(path == tuple(one.tokens[: len(path)]) for one in asked) for path in cached(drafter))
    assert sum(passes(drafter)) == 5 * (71 + 2) + 2 * 5 * 3
    drafts = propose(drafter, asked)
    assert sum(len(draft) > 0 for draft in drafts) == 2


def test_a_branch_beyond_the_draft_models_context_gets_no_drafts(checkpoints: Checkpoints) -> None:
    harness = Harness(checkpoints("qwen3"))
    drafter = DraftModel(load_model(checkpoints("llama"), lambda _: 32), context=32)
    drafter.reset(harness.core.cache)
    [one] = branches(harness, generate(PROMPT[:28], [Branch(1, 1, 90)], **LAW))
    lengths = []
    for _ in range(8):
        [draft] = propose(drafter, [one], depth=4, nodes=4)
        lengths.append(len(draft))
        one.tokens.append(1)
    # The last draft token is not computed, but the one before it is, at position 31 at most.
    assert lengths == [4, 4, 3, 2, 1, 0, 0, 0]
    assert drafter.cache.num_tables == 0


def test_an_unknown_branch_can_be_released_and_a_reset_releases_all(checkpoints: Checkpoints) -> None:
    harness, drafter = speculating(checkpoints("qwen3"), checkpoints("llama"))
    one, other = branches(harness, generate(PROMPT, [Branch(1, key, 9) for key in range(2)], **LAW))
    drafter.release(one)
    assert propose(drafter, []) == []
    propose(drafter, [one, other])
    drafter.reset(harness.core.cache)
    assert drafter.cache.num_available_pages == drafter.cache.pool.size
    drafter.release(one)
    [draft] = propose(drafter, [other])
    assert len(draft) == 3
