"""What a verifier may use of the job that it is opened for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.protocol.types import EngineClient, ModelInfo
from reasoner.answers.equivalence import Equivalence
from reasoner.budget.ledger import Ledger
from reasoner.jobs.spec import JobSpec
from reasoner.search.model_selection import verifier_selector
from reasoner.tree import Node

ESTIMATE_SLACK_TOKENS = 16
"""Tokens by which an estimate may be short: separators, and the part of a cached prefix that is read again."""


@dataclass(frozen=True, slots=True)
class VerifierContext:
    """The job and what serves it. ``policy`` writes the solutions; ``lease`` is the job's hold on the cache."""

    spec: JobSpec
    engine: EngineClient
    served: Mapping[str, ModelInfo]
    policy: ModelInfo
    lease: str
    ledger: Ledger
    equivalence: Equivalence
    unlocked_tests: bool = False
    """Whether Python tests may run where no sandbox holds them."""

    def verifier_model(self) -> ModelInfo:
        """The served model that the job's verifier is. Raises ``InvalidRequest`` when there is none of its name."""
        wanted = verifier_selector(self.spec.verifier)
        if wanted is None:
            raise ValueError(f"the verifier {self.spec.verifier!r} has no model")
        return wanted.find(self.served.values())


def estimate_new_tokens(node: Node, head: int) -> int:
    """About how many tokens of a node's text a verifier with a warm cache has not read; ``head``: of the question."""
    tokens = ESTIMATE_SLACK_TOKENS
    for known in reversed(node.lineage()):
        if known.scores:
            return tokens
        tokens += known.tokens + 1
    return tokens + head
