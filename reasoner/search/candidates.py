"""Candidates: the solutions among which a search chooses, and those that the client brought itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from engine.protocol.types import InvalidRequest
from reasoner.budget.usage import Usage
from reasoner.jobs.spec import JobSpec
from reasoner.search.replay import PendingEntry
from reasoner.search.stream_context import StreamContext
from reasoner.tree import Node, read_answer_level

_TEXTS_AT_ONCE = 16
"""Texts that are sent to the tokenizer at once."""


def select_candidates(nodes: Iterable[Node], spec: JobSpec) -> list[Node]:
    """Return the nodes among which a search chooses, in the order of their paths.

    Nodes with a flexible answer are candidates only if no node has a strict one, or if the verifier's score is a fact.
    """
    stated = sorted((node for node in nodes if node.answer is not None), key=lambda node: node.path)
    strict = [node for node in stated if node.answer_level == "strict"]
    return strict if strict and not spec.has_conclusive_verifier else stated


def list_finished(nodes: Iterable[Node]) -> list[Node]:
    """Return the solutions that the model ended, whether or not they state an answer, in the order of their paths."""
    ended = (node for node in nodes if node.reason in ("answer", "stop") and node.solves)
    return sorted((node for node in ended if node.solution.strip()), key=lambda node: node.path)


async def add_candidates(context: StreamContext) -> list[Node]:
    """Add the client's candidates to the tree, as finished solutions below the root, and return them."""
    log = context.replay_log
    keys = [f"given:{index}" for index in range(len(context.search.spec.candidates or ()))]
    entries = log.replay(keys) if log.is_replaying else await log.write(await _describe_candidates(context, keys))
    return [_add_candidate(context.root, entry.data) for entry in entries]


async def _describe_candidates(context: StreamContext, keys: list[str]) -> list[PendingEntry]:
    """Return the journal entries of the candidates. They are no one's spend."""
    slots = asyncio.Semaphore(_TEXTS_AT_ONCE)
    policy = context.search.policies[0].model

    async def describe(index: int, text: str, answer: str) -> PendingEntry:
        async with slots:
            token_ids = await context.search.engine.tokenize(policy.id, text, special=False)
        stated = await context.answers.find(answer)
        data = {
            "node": str(index),
            "parent": "",
            "part": 0,
            "text": text,
            "token_ids": list(token_ids),
            "tokens": len(token_ids),
            "cached": 0,
            "logprob": 0.0,
            "final": True,
            "reason": "stop",
            "answer": stated and stated.text,
            "answer_level": stated and stated.level,
            "given": True,
        }
        return PendingEntry(keys[index], "node", data, Usage())

    texts = context.search.spec.candidate_texts
    entries = list(await asyncio.gather(*(describe(index, *both) for index, both in enumerate(texts))))
    _check_room(context, [entry.data["tokens"] for entry in entries])
    return entries


def _check_room(context: StreamContext, lengths: list[int]) -> None:
    """Raise ``InvalidRequest`` for a candidate that, with the question, is beyond the verifier's context.

    Where two are compared, both are counted. The tokens are those of the policy's tokenizer.
    """
    verifier = context.search.verifier
    if verifier is None:
        return
    question = len(context.root.prefix)
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])[: 2 if context.search.comparer else 1]
    if question + sum(lengths[index] for index in order) > verifier.context:
        named = " and ".join(f"{index} ({lengths[index]} tokens)" for index in order)
        raise InvalidRequest(
            f"candidates: {named} and the question ({question}) are more than the context of model {verifier.id!r} "
            f"holds ({verifier.context}): shorten or leave out long candidates, or rank by 'majority'",
            f"candidates.{order[0]}",
        )


def _add_candidate(root: Node, data: dict[str, Any]) -> Node:
    prefix = root.prefix + tuple(data["token_ids"])
    node = Node((int(data["node"]),), root, prefix, data["text"], data["tokens"], reason="stop", answer=data["answer"])
    node.answer_level = read_answer_level(data)
    root.children.append(node)
    root.created += 1
    return node
