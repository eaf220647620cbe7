"""Rows with tokens: whole trees, and rollouts, the paths from prompts to leaves.

A node continues its parent if its tokens begin with all of its parent's. One that does not, because it begins another
conversation or takes back the end of its parent's text, begins a prompt of its own, and its parent is a leaf. So what a
row has through a node is exactly the beginning of what each of the nodes below has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from reasoner.jobs.view import NodeView
from reasoner.training_data.labels import By, choose_reward
from reasoner.training_data.recorded_job import LeftOut, NodeTokens, RecordedJob
from reasoner.training_data.rows import ChatMessage, RolloutRow, TreeNode, TreeRow


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of a node behind those of the node that it continues."""

    node: NodeView
    ids: list[int]
    mask: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class TokenPath:
    """The tokens from a prompt through a node."""

    prompt_ids: list[int]
    segments: tuple[Segment, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    @property
    def response_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.ids]


def build_tree(job: RecordedJob) -> list[TreeRow]:
    """Return the search tree, of any job whose search has begun."""
    if len(job.view.nodes) == 1:
        raise LeftOut("no_branch")
    spec, root = job.spec, job.tokens[""]
    row: TreeRow = {
        **job.columns,
        "status": job.document["status"],
        "model": spec.model,
        "strategy": spec.strategy.name,
        "messages": [ChatMessage(role=message["role"], content=message["content"]) for message in spec.to_messages()],
        "prompt_ids": root.prompt_ids,
        "nodes": [
            _describe_node(node, job.tokens[name]) for name, node in job.view.nodes.items() if node.parent is not None
        ],
        "comparisons": [
            {"nodes": list(comparison["nodes"]), "score": comparison["score"]} for comparison in job.view.comparisons
        ],
        "best": job.view.best,
        "answer": job.result.get("answer"),
        "confidence": job.result.get("confidence"),
    }
    return [row]


def _describe_node(node: NodeView, tokens: NodeTokens) -> TreeNode:
    assert node.parent is not None
    has_ids = tokens.has_ids and (bool(tokens.ids) or not node.text)
    return {
        "id": node.id,
        "parent": node.parent.id,
        "text": node.text,
        "token_ids": tokens.ids if has_ids else None,
        "logprobs": tokens.logprobs,
        "mask": tokens.mask,
        "prompt_ids": tokens.prompt_ids,
        "starts_conversation": node.starts_conversation,
        "is_solution": node.is_solution,
        "score": node.score,
        "step_scores": node.step_scores,
        "answer": node.answer,
        "reason": node.reason,
        "model": node.model,
    }


def build_rollouts(job: RecordedJob, by: By | None) -> list[RolloutRow]:
    """Return the paths to all leaves that have generated tokens of their own.

    Raises ``LeftOut`` for jobs whose tokens or log-probabilities the journal does not have.
    """
    if not job.spec.record_logprobs:
        raise LeftOut("not_recorded")
    reward, sampling = choose_reward(job, by), job.spec.sampling
    rows: list[RolloutRow] = []
    seen: set[str] = set()
    for path in iterate_leaves(job):
        segments, leaf = path.segments, path.segments[-1].node
        shared = sum(len(segment.ids) for segment in segments if segment.node.id in seen)
        seen.update(segment.node.id for segment in segments)
        mask = [flag for segment in segments for flag in segment.mask]
        rows.append(
            {
                **job.columns,
                "node": leaf.id,
                "path": [segment.node.id for segment in segments],
                "path_ends": _list_ends(segments),
                "model": leaf.model or job.spec.model,
                "prompt_ids": path.prompt_ids,
                "response_ids": path.response_ids,
                "response_mask": mask,
                "response_logprobs": [value for segment in segments for value in segment.logprobs],
                "shared_tokens": shared,
                "reward_score": reward(leaf),
                "finish_reason": leaf.reason,
                "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
                "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
                "top_k": sampling.top_k or 0,
                "min_p": sampling.min_p or 0.0,
            }
        )
    if not rows:
        raise LeftOut("no_branch")
    return rows


def iterate_leaves(job: RecordedJob) -> Iterator[TokenPath]:
    """Yield the tokens through each node with generated tokens that no node with such tokens continues.

    Siblings come in the order in which they were requested. Questions about solutions are left out. Raises ``LeftOut``
    as ``build_rollouts`` does.
    """
    nodes = [cast("NodeView", node) for node in job.view.root.walk() if node.parent is not None and node.is_solution]
    paths: dict[str, TokenPath] = {}
    if job.tokens[""].prompt_ids is not None:
        paths[""] = TokenPath(job.tokens[""].prompt_ids)
    for node in nodes:
        assert node.parent is not None
        paths[node.id] = _extend_path(paths.get(node.parent.id), node, job.tokens[node.id])
    continued: set[str] = set()
    for node in reversed(nodes):
        assert node.parent is not None
        segments = paths[node.id].segments
        if segments and (node.id in continued or any(segments[-1].mask)):
            continued.add(node.parent.id)
    for node in nodes:
        segments = paths[node.id].segments
        if node.id not in continued and segments and any(segments[-1].mask):
            yield paths[node.id]


def _extend_path(above: TokenPath | None, node: NodeView, tokens: NodeTokens) -> TokenPath:
    """Return the tokens through a node, behind those of its parent if it continues them."""
    if not tokens.has_ids:
        raise LeftOut("no_token_ids")
    through = tokens.prompt_ids
    if through is not None:
        known = [] if above is None else above.token_ids
        if above is None or node.starts_conversation or through[: len(known)] != known:
            return TokenPath(through)
        added = through[len(known) :]
        segment = Segment(node, added, [0] * len(added), [0.0] * len(added))
        return TokenPath(above.prompt_ids, (*above.segments, segment))
    if above is None:
        raise LeftOut("not_recorded")
    logprobs = tokens.logprobs or [None] * len(tokens.ids)
    mask = [int(flag and not tokens.is_copy) for flag in tokens.mask]
    if any(flag and value is None for flag, value in zip(mask, logprobs, strict=True)):
        raise LeftOut("no_logprobs")
    values = [value if flag and value is not None else 0.0 for flag, value in zip(mask, logprobs, strict=True)]
    return TokenPath(above.prompt_ids, (*above.segments, Segment(node, tokens.ids, mask, values)))


def _list_ends(segments: tuple[Segment, ...]) -> list[int]:
    """Return the number of tokens through each segment."""
    ends, total = [], 0
    for segment in segments:
        total += len(segment.ids)
        ends.append(total)
    return ends
