"""Penalties, bias and ``min_tokens``, compared with transformers' processors and OpenAI's formula in float64."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor

from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, InvalidRequest, SamplingParams
from engine.sampling.logits_processors import Penalties, forbid, penalise
from tests.closeness import EPS
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate
from tests.engine.ties import assert_same_tokens
from tests.seeds import shift

PROMPT = tuple(random.Random(shift(0)).randrange(3, 360) for _ in range(37))
VOCAB = 60
ALL: dict[str, object] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.3,
    "logit_bias": ((3, 4.5), (17, -100.0), (59, 2.0)),
}
SETTINGS: list[dict[str, object]] = [{name: value} for name, value in ALL.items()] + [ALL]


def reference(logits: Sequence[float], law: SamplingParams, prompt: Sequence[int], new: Sequence[int]) -> list[float]:
    """Return the logits by definition, token by token in Python's float64."""
    bias, counts, changed = dict(law.logit_bias), Counter(new), []
    for token, logit in enumerate(logits):
        value = logit + bias.get(token, 0.0)
        if token in prompt or token in counts:
            value = value / law.repetition_penalty if value > 0 else value * law.repetition_penalty
        value -= law.frequency_penalty * counts[token] + law.presence_penalty * (counts[token] > 0)
        changed.append(value)
    return changed


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_penalised_logits_equal_the_definition(settings: dict[str, object]) -> None:
    """One batch has rows with long, short and no histories, and one without penalties."""
    law, dice = SamplingParams(**settings), random.Random(shift(1))  # type: ignore[arg-type]
    prompt = [dice.randrange(VOCAB) for _ in range(15)]
    histories = [[dice.randrange(VOCAB) for _ in range(length)] for length in (0, 1, 40, 200)]
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(shift(1))) * 3
    ours, base = logits.clone(), Penalties(law, prompt)
    penalise(ours.numpy(), {row: base.fork(history) for row, history in zip((0, 1, 3, 4), histories, strict=True)})
    expected = [reference(logits[row].tolist(), law, prompt, new) for row, new in zip((0, 1, 3, 4), histories)]  # noqa: B905
    # Four operations in float32 on numbers of these sizes: counts times penalties are up to 8.
    bound = 4 * EPS * (np.abs(expected) + logits[[0, 1, 3, 4]].abs().numpy() + 8)
    assert (np.abs(ours[[0, 1, 3, 4]].numpy() - expected) <= bound).all()
    assert ours[2].tolist() == logits[2].tolist()


def test_the_repetition_penalty_equals_that_of_transformers() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(shift(2))) * 3
    prompt, new = [1, 5, 5, 9], [5, 30, 31, 31]
    ours = logits.clone()
    penalise(ours.numpy(), {0: Penalties(SamplingParams(repetition_penalty=1.7), prompt).fork(new)})
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + new]), logits)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=EPS)


def test_adding_tokens_one_by_one_equals_forking_with_all_of_them() -> None:
    def fresh() -> Penalties:
        return Penalties(SamplingParams(**ALL), [4, 5, 6])  # type: ignore[arg-type]

    base = fresh()
    dice = random.Random(shift(3))
    new = [4, 3, *(dice.randrange(VOCAB) for _ in range(120))]
    growing, sibling = base.fork([]), base.fork([7])
    for token in new:
        growing.add(token)
    for grown, whole in ((growing, fresh().fork(new)), (sibling, fresh().fork([7])), (base, fresh())):
        left, right = torch.ones(1, VOCAB), torch.ones(1, VOCAB)
        penalise(left.numpy(), {0: grown})
        penalise(right.numpy(), {0: whole})
        assert left.tolist() == right.tolist()


def test_forbidden_tokens_are_impossible_only_in_their_rows() -> None:
    logits = torch.zeros(3, VOCAB)
    forbid(logits.numpy(), {0: np.array([1, 2]), 2: np.array([59])})
    assert torch.nonzero(logits == -torch.inf).tolist() == [[0, 1], [0, 2], [2, 59]]


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3")


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded


def test_greedy_text_with_a_repetition_penalty_equals_transformers(folder: Path, model: torch.nn.Module) -> None:
    expected = model.generate(  # type: ignore[operator]
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)),
        max_new_tokens=40,
        min_new_tokens=40,
        do_sample=False,
        repetition_penalty=1.4,
        pad_token_id=0,
    )[0, len(PROMPT) :].tolist()
    request = generate(PROMPT, [Branch(1, 1, 40)], temperature=0.0, repetition_penalty=1.4, min_tokens=40)
    [ours] = Harness(folder).complete(request)
    assert_same_tokens(folder, [request], [ours.token_ids], [expected])
    [free] = Harness(folder).complete(generate(PROMPT, [Branch(1, 1, 40)], temperature=0.0, min_tokens=40))
    assert list(free.token_ids) != expected


def test_greedy_tokens_with_all_processors_equal_the_definition(folder: Path, model: torch.nn.Module) -> None:
    law = SamplingParams(**ALL)  # type: ignore[arg-type]
    tokens: list[int] = []
    with torch.no_grad():
        for _ in range(30):
            logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1]
            tokens.append(int(np.argmax(reference(logits.tolist(), law, PROMPT, tokens))))
    request = generate(PROMPT, [Branch(1, 1, 30)], temperature=0.0, ignore_eos=True, **ALL)
    [ours] = Harness(folder).complete(request)
    assert_same_tokens(folder, [request], [ours.token_ids], [tokens])


def test_cut_preempted_and_batched_branches_have_the_same_penalties(folder: Path) -> None:
    law = {**ALL, "temperature": 0.9, "ignore_eos": True}
    branches = [Branch(5, key, 60) for key in range(8)]
    alone = [Harness(folder).complete(generate(PROMPT, [branch], **law))[0].token_ids for branch in branches]
    squeezed = Harness(folder, EngineOptions(kv_tokens=320, max_running=8, step_tokens=64))
    plain = squeezed.submit(generate(PROMPT, [Branch(6, 0, 30)], ignore_eos=True))
    request = generate(PROMPT, branches, **law)
    assert_same_tokens(folder, [request], [one.token_ids for one in squeezed.complete(request)], alone)
    assert squeezed.core.stats.preemptions > 0
    assert plain
    for cut in (1, 17, 59):
        rest = Branch(5, 3, 60 - cut, generated=alone[3][:cut])
        request = generate(PROMPT, [rest], **law)
        [second] = squeezed.complete(request)
        assert_same_tokens(folder, [request], [second.token_ids], [alone[3][cut:]])


def test_a_part_of_the_prompt_counts_as_generated_from_where_the_request_says(folder: Path) -> None:
    """A search sends the beginning of a solution as a part of the prompt, whose penalties are those of one branch."""
    harness = Harness(folder)
    law = {"frequency_penalty": 1.4, "presence_penalty": 0.3, "temperature": 0.9, "ignore_eos": True}
    [whole] = harness.complete(generate(PROMPT, [Branch(5, 3, 60)], **law))
    for cut, more in ((20, 0), (20, 7)):
        prompt, begun = PROMPT + whole.token_ids[:cut], whole.token_ids[cut : cut + more]
        rest = Branch(5, 3, 60 - cut - more, generated=begun)
        [counted] = harness.complete(generate(prompt, [rest], **law, penalty_start=len(PROMPT)))
        [forgotten] = harness.complete(generate(prompt, [rest], **law))
        assert counted.token_ids == whole.token_ids[cut + more :]
        assert forgotten.token_ids != counted.token_ids
    with pytest.raises(InvalidRequest, match="penalty_start is 38; it must be between 0 and 37"):
        harness.submit(generate(PROMPT, [Branch(1, 1, 1)], penalty_start=38))


def test_nothing_stops_a_branch_before_min_tokens(folder: Path) -> None:
    harness = Harness(folder)
    [free] = harness.complete(generate(PROMPT, [Branch(4, 4, 60)], ignore_eos=True))
    stop_ids = tuple(free.token_ids[:5])
    [stopped] = harness.complete(generate(PROMPT, [Branch(4, 4, 60)], stop_token_ids=stop_ids, ignore_eos=True))
    assert len(stopped.token_ids) == 1
    request = generate(PROMPT, [Branch(4, 4, 60)], stop_token_ids=stop_ids, min_tokens=20, ignore_eos=True)
    [later] = harness.complete(request)
    assert len(later.token_ids) > 20
    assert not set(later.token_ids[:20]) & set(stop_ids)
    # Generated tokens count, so a branch that is continued ends where the whole one does.
    rest = Branch(4, 4, 60 - 9, generated=later.token_ids[:9])
    request = generate(PROMPT, [rest], stop_token_ids=stop_ids, min_tokens=20, ignore_eos=True)
    [continued] = harness.complete(request)
    assert_same_tokens(folder, [request], [continued.token_ids], [later.token_ids[9:]])


def test_the_end_of_sequence_is_not_sampled_before_min_tokens(folder: Path) -> None:
    harness = Harness(folder)
    eos = harness.complete(generate(PROMPT, [Branch(0, 0, 1)], temperature=0.0))[0].token_ids
    harness.core.model._eos = frozenset(eos)
    [at_once] = harness.complete(generate(PROMPT, [Branch(0, 0, 9)], temperature=0.0))
    [later] = harness.complete(generate(PROMPT, [Branch(0, 0, 9)], temperature=0.0, min_tokens=4))
    assert (at_once.token_ids, at_once.finish_reason) == (eos, "stop")
    assert len(later.token_ids) > 4
    assert not set(eos) & set(later.token_ids[:4])


def test_a_stop_string_counts_only_after_min_tokens(folder: Path) -> None:
    harness = Harness(folder)
    [free] = harness.complete(generate(PROMPT, [Branch(4, 4, 40)], ignore_eos=True))
    stop = (free.text[1], free.text[-1])
    request = generate(PROMPT, [Branch(4, 4, 40)], ignore_eos=True, stop=stop, min_tokens=12)
    [ours] = harness.complete(request)
    assert len(ours.token_ids) > 12
    assert ours.token_ids == free.token_ids[: len(ours.token_ids)]
    assert stop[0] in ours.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("logit_bias", ((400, 1.0),)),
        ("logit_bias", ((3, 101.0),)),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop", ("x" * 300,)),
        ("stop", ("x",) * 65),
    ],
)
def test_parameters_out_of_range_are_rejected_by_name(folder: Path, field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Harness(folder).submit(generate(PROMPT, [Branch(1, 1, 1)], **{field: value}))
    assert refusal.value.field == field


def test_a_request_that_forbids_every_token_is_rejected(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="stop tokens are the whole vocabulary"):
        Harness(folder).submit(generate(PROMPT, [Branch(1, 1, 1)], stop_token_ids=tuple(range(400)), min_tokens=1))
