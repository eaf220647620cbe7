"""The job of a search, and what the search depends on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from engine.protocol.constraint import Constraint
from engine.protocol.types import EngineClient, ModelInfo
from reasoner.answers.equivalence import Equivalence
from reasoner.budget.ledger import Ledger
from reasoner.confidence.calibration import Calibration
from reasoner.jobs.journal import Journal
from reasoner.jobs.spec import JobSpec
from reasoner.search.calls.functions import FunctionReader
from reasoner.search.calls.runner import CallRunner
from reasoner.search.policies.policy import Policy
from reasoner.search.prefix_pin import PrefixPin
from reasoner.search.scoring import NodeScorer, PairScorer
from reasoner.tree import Node


@dataclass(frozen=True, slots=True)
class SearchContext:
    """A search's job and its dependencies."""

    spec: JobSpec
    engine: EngineClient
    policies: tuple[Policy, ...]
    """The models that write the solutions, usually one."""
    prefix_pin: PrefixPin
    journal: Journal
    ledger: Ledger
    equivalence: Equivalence
    """Compares answers within the job's time."""
    cancelled: asyncio.Event
    scorer: NodeScorer | None = None
    """The job's verifier, if the strategy uses one that scores solutions."""
    comparer: PairScorer | None = None
    """The job's verifier, if the strategy uses one that compares solutions."""
    verifier: ModelInfo | None = None
    """The verifier's model, if it has one and the strategy uses it."""
    calibration: Calibration | None = None
    """Calibration table that holds for the job's models, if there is one."""
    calibration_gap: str | None = None
    """Why that table is left out for this question."""
    left_out: tuple[str, ...] = ()
    """Models of the job whose servers were away when the search began."""
    functions: FunctionReader | None = None
    """Reads calls of the client's functions, if the job has any."""
    calls: CallRunner | None = None
    """Runs the calls of branches, if the job allows a tool."""

    forced_calls: Constraint | None = None
    """Language of the calls with which solutions must end, if the engine can hold them to it."""

    @property
    def constraint(self) -> Constraint | None:
        """Language of the solutions after their thoughts, if there is one."""
        return self.forced_calls if self.spec.constraint is None else self.spec.constraint.to_constraint()

    def policy(self, node: Node) -> Policy:
        """Return the policy that continues a node."""
        return self.policies[node.policy]
