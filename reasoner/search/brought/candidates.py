"""Candidates that the client brought: they are added to the tree as finished solutions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.protocol.thoughts import find_thought
from engine.protocol.types import InvalidRequest, TokenizeRequest, Tokens
from engine.protocol.wire import read_tokens, write_tokens
from reasoner.budget.usage import Usage
from reasoner.jobs.candidate_spec import Piece
from reasoner.jobs.thought_spec import ThoughtSpec
from reasoner.search.brought.shorten import shorten
from reasoner.search.replay import PendingEntry
from reasoner.search.stream_context import StreamContext
from reasoner.tree import Node, PartKind, Reads, ThoughtState, add_end, read_parts

_TEXTS_AT_ONCE = 16
"""Texts that are sent to the tokenizer at once."""


_MAX_QUESTION_TOKENS = 512
"""Tokens that are left in a verifier's context for its question and answer, or an eighth of it if that is less."""


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

    limit, reads, own = _find_limit(context), _find_parts_read(context), context.search.spec.thoughts
    delimiters = None if own is None else (own.open, own.close)

    async def count(text: str) -> int:
        span = find_thought(text, delimiters) if reads == "answer" else None
        return len(await tokenize(text if span is None else text[span.end :]))

    async def describe(index: int, pieces: Sequence[Piece]) -> PendingEntry:
        left_out = 0
        if limit is not None and pieces[-1].message:
            pieces, left_out = await shorten(pieces, limit, count)
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
        if left_out:
            data["left_out"] = left_out
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


def _split_thoughts(pieces: Sequence[Piece], thoughts: ThoughtSpec | None) -> _Split:
    """Split the words of the assistant into thought and answer."""
    own = None if thoughts is None else (thoughts.open, thoughts.close)
    texts: list[tuple[str, PartKind]] = []
    state: ThoughtState | None = None
    answer = ""
    for piece in pieces:
        span = find_thought(piece.text, own) if piece.kind == "words" else None
        end = 0 if span is None else span.end
        texts += [(piece.text[:end], "thought"), (piece.text[end:], "answer")]
        if span is not None:
            state = "closed" if span.is_closed else "open"
        if piece.kind == "words" and piece.message == pieces[-1].message:
            answer = piece.text[end:]
    return _Split([(text, kind) for text, kind in texts if text], answer, state)


def _find_parts_read(context: StreamContext) -> Reads:
    """Return the parts of candidates that the verifier may read."""
    verifier = context.search.spec.verifier
    if verifier is None or verifier.can_read_branches:
        return "all"
    reads: Reads = getattr(verifier, "reads", "all")
    return reads


def _find_limit(context: StreamContext) -> int | None:
    """Return the tokens that a candidate may have beside the question and what a verifier asks; ``None`` for any."""
    verifier = context.search.verifier
    if verifier is None:
        return None
    room = verifier.context - len(context.root.prefix) - min(_MAX_QUESTION_TOKENS, verifier.context // 8)
    return room // 2 if context.search.comparer else room


def _count_read_tokens(context: StreamContext, data: dict[str, Any]) -> int:
    """Return the number of a candidate's tokens that the verifier reads."""
    reads = _find_parts_read(context)
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
