"""Requests and steps for the n-gram drafter, without an engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch

from engine.cache.paged_kv import KVCache
from engine.protocol.types import Branch, SamplingParams
from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence, Request
from engine.speculation.drafter import DraftRequest, StepResult
from engine.speculation.drafters.ngram import NgramDrafter

NO_STATES = torch.empty(0, 0)
CACHE = cast(KVCache, None)
"""The n-gram drafter reads neither the cache nor hidden states."""
SIZES, WIDTH, LIFE = (12, 9, 6, 4, 2, 1), 5, 1024
"""Sizes of n-grams, followers kept per n-gram, and upper bound of an n-gram's total count."""


def request(
    prompt: Iterable[int],
    branches: int = 1,
    pin_key: str | None = None,
    namespace: str | None = None,
    *,
    temperature: float = 0.0,
) -> Request:
    in_flight = Request("r", lambda _: None, pin_key=pin_key, namespace=namespace)
    for index in range(branches):
        tokens = list(prompt)
        in_flight.sequences.append(
            GenerateSequence(
                request=in_flight,
                index=index,
                tokens=tokens,
                num_prefix_tokens=len(tokens),
                branch=Branch(0, index, 1000),
                seed=0,
                key=index,
                sampling=SamplingParams(temperature=temperature),
                eos=frozenset(),
                stop_strings=None,
                reader=cast(Any, None),
                generated=[],
                text_start=0,
                num_chars_searched=0,
                num_chars_sent=0,
            )
        )
    return in_flight


def branches_of(requests: Iterable[Request]) -> list[GenerateSequence]:
    return [one for in_flight in requests for one in in_flight.sequences if isinstance(one, GenerateSequence)]


def only(in_flight: Request) -> GenerateSequence:
    (sequence,) = branches_of([in_flight])
    return sequence


def advances(sequences: Iterable[GenerateSequence]) -> list[StepResult]:
    return [StepResult(sequence, len(sequence.tokens) - 1, [0]) for sequence in sequences]


def step(
    drafter: NgramDrafter, drawn: dict[GenerateSequence, list[int]], shape: tuple[int, int] = (4, 4)
) -> list[Draft]:
    """Simulate one step of the engine, in which each branch gets a draft and then tokens."""
    drafts = drafter.propose([DraftRequest(sequence, *shape) for sequence in drawn])
    for sequence, tokens in drawn.items():
        sequence.tokens += tokens
    drafter.observe_step(advances(drawn), NO_STATES)
    return drafts


def write(drafter: NgramDrafter, in_flight: Request, text: Iterable[int]) -> None:
    """Let the branches of a request generate ``text`` and finish."""
    sequences = branches_of([in_flight])
    for token in text:
        step(drafter, {sequence: [token] for sequence in sequences})
    for sequence in sequences:
        finish(drafter, sequence)


def finish(drafter: NgramDrafter, sequence: GenerateSequence) -> None:
    sequence.request.sequences.remove(sequence)
    drafter.release(sequence)


def chain(drafter: NgramDrafter, sequence: GenerateSequence, depth: int = 4) -> list[int]:
    (draft,) = drafter.propose([DraftRequest(sequence, depth, depth)])
    assert draft.is_chain
    return list(draft.tokens)


# Proposed drafts.
