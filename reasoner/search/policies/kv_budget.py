"""The part of a solution whose keys a ``kv_budget`` bounds: its thought, or without delimiters all that it has."""

from __future__ import annotations

from dataclasses import replace

from engine.protocol.request_checks import require_ids
from engine.protocol.types import SamplingParams
from reasoner.thoughts import ThoughtFormat
from reasoner.tree import Node


def bound_keys(sampling: SamplingParams, thoughts: ThoughtFormat | None, parent: Node, question: int) -> SamplingParams:
    """Return the parameters of a branch with the place of its thought; without a budget if its prompt closes it.

    ``question``: tokens of the job's question. Later conversations, which show solutions, leave a thought as much room.
    """
    start = len(parent.prefix) - len(parent.completion_ids)
    if sampling.kv_budget is not None:
        sampling = replace(sampling, kv_budget=sampling.kv_budget + start - question)
    if thoughts is None:
        return replace(sampling, kv_start=start)
    if thoughts.find_state(parent.prefix[:start]) == "closed":
        return replace(sampling, kv_budget=None)
    end = thoughts.closing_ids[:1] if thoughts.has_end_token else thoughts.closing_ids
    return replace(sampling, kv_start=start, kv_end=require_ids(end, "thoughts.close"))
