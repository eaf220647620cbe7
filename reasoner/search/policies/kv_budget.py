"""The part of a solution whose keys a ``kv_budget`` bounds: its thought, or without delimiters all that it has."""

from __future__ import annotations

from dataclasses import replace

from engine.protocol.request_checks import require_ids
from engine.protocol.types import KeyBound, SamplingParams
from reasoner.search.policies.policy import Policy
from reasoner.tree import Node


def bound_keys(sampling: SamplingParams, policy: Policy, parent: Node, seed: int) -> SamplingParams:
    """Return the parameters of a branch with the place of its thought; without a budget if its prompt closes it."""
    bound = find_branch_bound(policy, parent, seed)
    if bound is None:
        return replace(sampling, kv_budget=None)
    return replace(sampling, kv_budget=bound.budget, kv_start=bound.start, kv_end=bound.end)


def find_branch_bound(policy: Policy, node: Node, seed: int) -> KeyBound | None:
    """Return the bound of whatever goes on behind a node; ``None`` if all keys of its conversation are kept.

    ``seed``: the job's. Conversations that show solutions to the model leave a thought as much room as the question.
    """
    budget, thoughts = policy.sampling.kv_budget, policy.thoughts
    if budget is None:
        return None
    start = len(node.prefix) - len(node.completion_ids)
    budget += start - len(_find_root(node).prefix)
    if thoughts is None:
        return KeyBound(budget, start, seed=seed)
    if thoughts.find_state(node.prefix[:start]) == "closed":
        return None
    end = thoughts.closing_ids[:1] if thoughts.has_end_token else thoughts.closing_ids
    return KeyBound(budget, start, require_ids(end, "thoughts.close"), seed)


def _find_root(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node
