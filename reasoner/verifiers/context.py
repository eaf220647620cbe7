"""The part of a job that its verifier may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.protocol.types import EngineClient, KeyBound, ModelInfo
from reasoner.answers.equivalence import Equivalence
from reasoner.budget.ledger import Ledger
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.verifier_specs import ProbeVerifier
from reasoner.search.policies.kv_budget import find_branch_bound
from reasoner.search.policies.policy import Policy
from reasoner.search.policies.selection import verifier_selector
from reasoner.tree import Node, Reads

ESTIMATE_SLACK_TOKENS = 16
"""Tokens added to an estimate for separators and the part of a cached prefix that is computed again."""


@dataclass(frozen=True, slots=True)
class VerifierContext:
    """The job and what serves it. ``policy`` writes the solutions; ``pin_key`` names the job's pins in the cache."""

    spec: JobSpec
    engine: EngineClient
    served: Mapping[str, ModelInfo]
    policy: ModelInfo
    pin_key: str
    ledger: Ledger
    equivalence: Equivalence
    allow_unsandboxed_python: bool = False
    """True if Python tests may run where there is no sandbox."""
    policies: Sequence[Policy] = ()
    """The job's policies; none if it only judges solutions that it is given."""

    def find_branch_bound(self, node: Node, model: ModelInfo) -> KeyBound | None:
        """Return the bound on the keys of a branch for a model that is asked behind it.

        ``None`` for a model that shares no keys with the policy and reads the whole branch.
        """
        is_same = model.id == self.policy.id or (model.parent == self.policy.id and bool(model.invocation))
        if not is_same or not self.policies:
            return None
        return find_branch_bound(self.policies[node.policy], node, self.spec.seed)

    def verifier_model(self) -> ModelInfo:
        """Return the served model of the job's verifier. Raises ``InvalidRequest`` if none has its name."""
        verifier = self.spec.verifier
        if isinstance(verifier, ProbeVerifier) and verifier.model is None:
            verifier = verifier.model_copy(update={"model": self.policy.id})
        wanted = verifier_selector(verifier)
        if wanted is None:
            raise ValueError(f"the verifier {self.spec.verifier!r} has no model")
        return wanted.find(self.served.values())


def estimate_new_tokens(node: Node, head: int, reads: Reads) -> int:
    """Estimate the tokens that a verifier with a warm cache computes for a node; ``head`` are those of the question."""
    tokens = ESTIMATE_SLACK_TOKENS
    for ancestor in reversed(node.lineage()):
        if ancestor.scores:
            return tokens
        tokens += ancestor.count_tokens(reads) + 1
    return tokens + head
