"""What a verifier may use of the job that it is opened for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.types import EngineClient, InvalidRequest, ModelInfo
from reasoner.budget import Ledger
from reasoner.equivalence import Equivalence
from reasoner.jobs import JobSpec
from reasoner.tree import Node

SLACK = 16
"""Tokens by which an estimate may be short: separators, and the part of a cached prefix that is read again."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The job and what serves it. ``policy`` writes the solutions; ``lease`` is the job's hold on the cache."""

    spec: JobSpec
    engine: EngineClient
    served: Mapping[str, ModelInfo]
    policy: ModelInfo
    lease: str
    ledger: Ledger
    equivalence: Equivalence


def served_model(served: Mapping[str, ModelInfo], name: str | None, field: str, kind: str) -> ModelInfo:
    """The model of that name, or the only one of the kind. Raises ``InvalidRequest`` that lists what is served."""
    fitting = sorted(info.id for info in served.values() if info.kind == kind)
    if name is None and len(fitting) == 1:
        name = fitting[0]
    if name not in fitting:
        raise InvalidRequest(f"{field} {name!r} is not served; served are {', '.join(fitting) or 'none'}", field)
    return served[name]


def new_tokens(node: Node, head: int) -> int:
    """About how many tokens of a node's text a verifier with a warm cache has not read; ``head``: of the question."""
    tokens = SLACK
    for known in reversed(node.lineage()):
        if known.scores:
            return tokens
        tokens += known.tokens + 1
    return tokens + head
