"""Log-probabilities of the tokens of a finished solution, by one forward pass at the end of a search.

A search generates a solution in several requests, with the parameters of its sampling, so the distribution of the model
itself is read once more, for the chosen solutions alone. These tokens are the bill's like a verifier's. Nothing is set
aside for them: where the budget or the time is used up, a solution has no log-probabilities.
"""

from __future__ import annotations

import uuid
from contextlib import aclosing
from functools import partial
from typing import Any

from engine.protocol.types import Branch, Completion, EngineUnavailable, GenerateRequest, SamplingParams, TokenLogprob
from reasoner.budget.usage import Usage
from reasoner.deadline import run_unless, run_within
from reasoner.jobs.job import TokenProbability, TopToken
from reasoner.jobs.journal import JobCancelled
from reasoner.search.context import SearchContext
from reasoner.search.replay import PendingEntry
from reasoner.search.stream_context import StreamContext
from reasoner.tree import LEAST_LOGPROB, Node


async def compute_logprobs(context: StreamContext, node: Node, count: int) -> list[TokenProbability] | None:
    """Return the log-probabilities of the tokens of a solution's answer, through the journal.

    ``count``: the number of likeliest tokens at each position. ``None`` if the budget does not reach that far.
    """
    log, key = context.replay_log, f"logprobs:{node.id}"
    if log.is_replaying:
        entries = log.replay((key,))
    else:
        entries = await log.write([await _ask_logprobs(context, node, count, key)])
    tokens = entries[0].data["logprobs"] if entries else None
    return None if tokens is None else [_read_token(token, entries[0].data["texts"]) for token in tokens]


def count_answer_tokens(node: Node) -> int:
    """Return the number of tokens of a solution after its thought, without an end of sequence."""
    if node.thought is None:
        num_tokens = len(node.completion_ids)
    else:
        num_tokens = sum(part.num_tokens for part in node.turn_parts if part.kind == "answer")
    return max(0, min(num_tokens, len(node.completion_ids)) - node.ended_with_eos)


async def _ask_logprobs(context: StreamContext, node: Node, count: int, key: str) -> PendingEntry:
    """Return the journal entry of a solution. Raises ``JobCancelled`` as soon as the job is cancelled."""
    search = context.search
    policy, ledger = search.policy(node).model, search.ledger
    prompt = node.prefix[: len(node.prefix) - node.ended_with_eos]
    num_answer = count_answer_tokens(node)
    data: dict[str, Any] = {"node": node.id, "logprobs": None, "texts": {}, **context.name_model(policy)}
    rate = ledger.rate_of_model(policy)
    most = rate.max_verification_amount(len(prompt) + 1, 1)  # some servers cannot score without a new token
    if not num_answer or ledger.is_exhausted or ledger.max_affordable(most, may_use_answer_reserve=True) < 1:
        return PendingEntry(key, "logprobs", data, Usage())
    ledger.reserve(most)
    try:
        completion = await _score(
            search,
            GenerateRequest(
                request_id=f"{search.prefix_pin.key}-{uuid.uuid4().hex}",
                model=policy.id,
                prompt=prompt,
                branches=(Branch(context.seed, 0, 0),),
                sampling=SamplingParams(prompt_logprobs=count),
                pin_key=search.prefix_pin.key,
            ),
        )
    except BaseException:
        ledger.release(most)
        raise
    if completion is None:
        ledger.release(most)
        return PendingEntry(key, "logprobs", data, Usage())
    data |= _describe(completion, num_answer)
    spend = rate.verification_usage(completion.prompt_tokens - completion.cached_tokens, completion.cached_tokens)
    return PendingEntry(key, "logprobs", data=data, spend=spend, reserved=most)


async def _score(search: SearchContext, request: GenerateRequest) -> Completion | None:
    """Return the engine's answer, or ``None`` if the job's time ends before."""

    async def read() -> Completion:
        async with aclosing(search.engine.generate(request)) as events:
            completions = [event async for event in events if isinstance(event, Completion)]
        if not completions:
            raise EngineUnavailable("the engine's answer ended before its log-probabilities")
        return completions[0]

    seconds = search.ledger.seconds_until_cut()
    completion = await run_unless(search.cancelled, partial(run_within, seconds, read))
    if completion is None and search.cancelled.is_set():
        raise JobCancelled
    return completion


def _describe(completion: Completion, num_answer: int) -> dict[str, Any]:
    """Return the journal data of the last tokens of a prompt."""
    scored = [token for token in (completion.prompt_logprobs or ())[-num_answer:] if token is not None]
    used = {token.token_id for token in scored} | {id for token in scored for id, _ in token.top}
    texts = {str(id): text for id, text in completion.token_texts.items() if id in used}
    return {"logprobs": [_flatten(token) for token in scored], "texts": texts}


def _flatten(token: TokenLogprob) -> list[Any]:
    top = [[id, max(value, LEAST_LOGPROB)] for id, value in token.top]
    return [token.token_id, max(token.logprob, LEAST_LOGPROB), top]


def _read_token(token: list[Any], texts: dict[str, str]) -> TokenProbability:
    id, logprob, top = token
    likeliest = [TopToken(token=texts[str(other)], logprob=value) for other, value in top]
    return TokenProbability(token=texts[str(id)], logprob=logprob, top=likeliest)
