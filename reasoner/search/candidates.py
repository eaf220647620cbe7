"""Candidates: the solutions among which a search chooses, and those that the client brought itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.protocol.thoughts import find_thought
from engine.protocol.types import InvalidRequest, TokenizeRequest, Tokens
from engine.protocol.wire import read_tokens, write_tokens
from reasoner.budget.usage import Usage
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.thought_spec import ThoughtSpec
from reasoner.search.replay import PendingEntry
from reasoner.search.stream_context import StreamContext
from reasoner.tree import Node, PartKind, Reads, ThoughtState, add_end, read_parts

_TEXTS_AT_ONCE = 16
"""Texts that are sent to the tokenizer at once."""


def select_candidates(nodes: Iterable[Node], spec: JobSpec | None) -> list[Node]:
    """Return the nodes among which a search chooses, in the order of their paths.

    Nodes with a flexible answer are candidates only if no node has a strict one, or if the verifier's score is a fact,
    which it is not without a job.
    """
    stated = sorted((node for node in nodes if node.answer is not None), key=lambda node: node.path)
    strict = [node for node in stated if node.answer_level == "strict"]
    is_fact = spec is not None and spec.has_conclusive_verifier
    return strict if strict and not is_fact else stated


def list_finished(nodes: Iterable[Node]) -> list[Node]:
    """Return the solutions that the model ended, whether or not they state an answer, in the order of their paths."""
    ended = (node for node in nodes if node.reason in ("answer", "stop") and node.is_solution)
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

    async def tokenize(text: str) -> Tokens:
        if not text:
            return ()
        async with slots:
            return await context.search.engine.tokenize(TokenizeRequest(policy.id, text, special=False))

    async def describe(index: int, pieces: Sequence[tuple[str, bool]]) -> PendingEntry:
        split = _split_thoughts(pieces, context.search.spec.thoughts)
        token_ids = [await tokenize(text) for text, _ in split.texts]
        stated = await context.answers.find(split.answer, has_thought=False)
        data = {
            "node": str(index),
            "parent": "",
            "part": 0,
            "text": "".join(text for text, _ in split.texts),
            "token_ids": [token for ids in token_ids for token in write_tokens(ids)],
            "tokens": sum(map(len, token_ids)),
            "cached": 0,
            "logprob": 0.0,
            "final": True,
            "reason": "stop",
            "answer": stated and stated.text,
            "answer_level": stated and stated.level,
            "given": True,
        }
        if split.state is not None:
            kinds = zip(split.texts, token_ids, strict=True)
            data["parts"] = [[kind, "generated", len(text), len(ids)] for (text, kind), ids in kinds]
            thought = sum(len(ids) for (_, kind), ids in zip(split.texts, token_ids, strict=True) if kind == "thought")
            data["thought"] = {"state": split.state, "tokens": thought}
        return PendingEntry(keys[index], "node", data, Usage())

    candidates = context.search.spec.candidate_pieces
    entries = list(await asyncio.gather(*(describe(*each) for each in enumerate(candidates))))
    _check_room(context, [_count_read_tokens(context, entry.data) for entry in entries])
    return entries


@dataclass(frozen=True, slots=True)
class _Split:
    """A candidate's text in parts. ``answer``: the part that may state its answer; empty after an open thought."""

    texts: list[tuple[str, PartKind]]
    answer: str
    state: ThoughtState | None
    """State of the last thought; ``None`` if the candidate has none."""


def _split_thoughts(pieces: Sequence[tuple[str, bool]], thoughts: ThoughtSpec | None) -> _Split:
    """Split the pieces that the assistant wrote into thought and answer."""
    own = None if thoughts is None else (thoughts.open, thoughts.close)
    texts: list[tuple[str, PartKind]] = []
    state: ThoughtState | None = None
    end = 0
    for text, is_own in pieces:
        span = find_thought(text, own) if is_own else None
        end = 0 if span is None else span.end
        texts += [(text[:end], "thought"), (text[end:], "answer")]
        if span is not None:
            state = "closed" if span.is_closed else "open"
    last = pieces[-1][0]
    return _Split([(text, kind) for text, kind in texts if text], last[end:], state)


def _count_read_tokens(context: StreamContext, data: dict[str, Any]) -> int:
    """Return the number of a candidate's tokens that the verifier reads."""
    reads: Reads = getattr(context.search.spec.verifier, "reads", "all")
    parts = read_parts(data)
    if not parts or reads == "all":
        return int(data["tokens"])
    return sum(part.num_tokens for part in parts if part.kind == reads)


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
    prefix = root.prefix + read_tokens(data["token_ids"], root.prefix)
    node = Node((int(data["node"]),), root, prefix=prefix, text=data["text"], tokens=data["tokens"])
    add_end(node, data)
    node.parts = read_parts(data)
    node.thought = data["thought"]["state"] if "thought" in data else None
    root.children.append(node)
    root.num_children_requested += 1
    return node
