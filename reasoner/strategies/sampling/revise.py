"""Sequential revision: every attempt has earlier ones in its context and may correct them; several chains in parallel.

Source: Snell et al. 2024, "Scaling LLM Test-Time Compute Optimally", section 6: up to four earlier attempts in the
context, and the answer chosen among all attempts by a vote or by a verifier. Their model was trained to revise. Here
the attempts are turns of a conversation, each followed by a request to check it, which depends on the chat model's
training.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Annotated, Literal

from pydantic import Field

from engine.protocol.types import InvalidRequest
from reasoner.jobs.candidate_spec import MAX_N
from reasoner.search.search import Search
from reasoner.strategies.base import (
    Choice,
    DecidedBy,
    Params,
    Samples,
    Strategy,
    VerifierUse,
    choose_best_scored,
    choose_by_majority,
    read_answer,
)
from reasoner.tree import Node

REQUEST = (
    "Check the solution above. If there is a mistake in it, find and correct it. "
    "Give the whole solution again, with the final answer in \\boxed{}."
)


class Revise(Params):
    n: Samples = 16
    chains: Annotated[
        int | None, Field(ge=1, le=MAX_N, description="Chains of about n / chains attempts; default: the root of n.")
    ] = None
    memory: Annotated[int, Field(ge=1, le=16, description="Earlier attempts that an attempt sees at most.")] = 4
    by: Annotated[
        Literal["majority", "verifier"], Field(description="What chooses among all attempts: a vote, or the verifier.")
    ] = "majority"
    request: Annotated[str, Field(min_length=1, max_length=2000, description="What is said to an attempt.")] = REQUEST


async def run(search: Search, params: Revise) -> Choice:
    """Sample n attempts in chains, each seeing the last ones of its chain; a vote or the verifier chooses."""
    if params.by == "verifier" and not search.has_verifier:
        raise InvalidRequest("there is no verifier to choose: give 'by' as 'majority'", "strategy.by")
    attempts: dict[int, list[Node]] = defaultdict(list)
    width = min(params.chains or math.isqrt(params.n), params.n)
    async with search.stream() as stream:
        stream.complete([search.root], width)
        async for nodes in stream:
            if params.by == "verifier":
                await search.score([node for node in nodes if node.answer is not None])
            for node in nodes:
                chain = node.path[0]
                attempts[chain].append(node)
                if len(attempts[chain]) < len(range(chain, params.n, width)):
                    stream.complete([await _start_attempt(search, params, attempts[chain])], 1)
    candidates = search.candidates()
    if params.by == "verifier":
        return choose_best_scored(candidates)
    return await choose_by_majority(search, candidates, dict.fromkeys(candidates, 1.0))


async def _start_attempt(search: Search, params: Revise, attempts: list[Node]) -> Node:
    """Start the conversation of the next attempt and return its node.

    It contains as many of the last attempts as leave room for another one of the longest attempt's length. If there is
    no room, or the attempts are empty, the chain starts over. Attempts are shown without their thoughts.
    """
    longest = max(attempt.tokens for attempt in attempts)
    shown = [text for attempt in attempts[-params.memory :] if (text := read_answer(attempt)).strip()]
    while True:
        messages = search.spec.to_messages()
        for text in shown:
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": params.request}]
        if not shown or len(await search.tokenize(messages)) + longest <= search.context:
            return await search.start_conversation(attempts[-1], messages)
        shown = shown[1:]


STRATEGY = Strategy("revise", Revise, run=run, verifier=VerifierUse.OPTIONAL, decided_by=DecidedBy.VOTE)
