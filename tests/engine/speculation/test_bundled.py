"""Speculative decoding of the models that ship with Reasoner."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import reasoner
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, GenerateRequest
from engine.speculation.control.controller import FixedController
from engine.speculation.drafters.draft_model import DraftModel
from engine.speculation.load import load_drafter
from reasoner.evaluation.suites.registry import load_problems
from tests.engine.helpers import Harness, generate
from tests.engine.ties import assert_same_tokens
from tests.long import mostly_long

BUNDLED = Path(reasoner.__file__).parent / "bundled"
OPTIONS = EngineOptions(kv_tokens=40_000, max_running=64)

Answers = list[tuple[int, ...]]


@cache
def problems() -> list[str]:
    return [problem.text for problem in load_problems("countdown", limit=150) + load_problems("words", limit=50)]


def requests(temperature: float) -> list[GenerateRequest]:
    tokenizer = Harness(BUNDLED / "policy", OPTIONS).core.model.tokenizer
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in problems()]
    return [generate(prompt, [Branch(0, 0, 96)], temperature=temperature) for prompt in prompts]


def answers(draft: str, temperature: float) -> tuple[Answers, int]:
    """Return the policy's answers to 200 problems, and the number of accepted draft tokens."""
    harness = Harness(BUNDLED / "policy", OPTIONS)
    model = harness.core.model
    drafter = load_drafter(draft, BUNDLED / "policy", model.decoder, context=model.info.context)
    if drafter is not None:
        harness.core.start_speculation(drafter, FixedController(4, 6))  # the adaptive one may stop drafting
    heard = [harness.submit(request) for request in requests(temperature)]
    while harness.core.has_work:
        harness.core.step()
    harness.core.check_invariants()
    completions = [event for [event] in heard if isinstance(event, Completion)]
    return [one.token_ids for one in completions], sum(one.accepted_tokens for one in completions)


@pytest.fixture(scope="module", params=mostly_long([0.0, 0.7], every=2), ids=["greedy", "sampled"])
def plain(request: pytest.FixtureRequest) -> tuple[float, Answers]:
    tokens, accepted = answers("off", request.param)
    assert len(tokens) == 200
    assert accepted == 0
    return request.param, tokens


@pytest.mark.parametrize(
    "draft", mostly_long(["auto", "ngram", f"draft_model={BUNDLED / 'draft'}"], every=3), ids=["auto", "ngram", "draft"]
)
def test_200_problems_are_answered_with_the_same_tokens(plain: tuple[float, Answers], draft: str) -> None:
    temperature, expected = plain
    tokens, accepted = answers(draft, temperature)
    assert_same_tokens(BUNDLED / "policy", requests(temperature), tokens, expected)
    assert accepted > (0.65 * sum(map(len, tokens)) if draft == "auto" else 100)


@pytest.mark.parametrize("name", ["policy", "policy-large"])
def test_the_bundled_drafter_is_a_small_model_that_drafts_a_chain_in_one_call(name: str) -> None:
    speculator = Harness(BUNDLED / name, replace(OPTIONS, draft="auto")).core.runner.speculator
    assert speculator is not None
    drafter = speculator.drafter
    assert isinstance(drafter, DraftModel)
    assert drafter._model.parameters < 200_000
    assert drafter._chains is not None
