"""The type of strategies, and selection rules that several of them share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field, ValidationError

from engine.protocol.types import Capability
from reasoner.answers.extraction.extract import strip_thinking
from reasoner.answers.votes import Vote, count_votes, group_equivalent
from reasoner.base_model import StrictModel
from reasoner.jobs.candidate_spec import MAX_N
from reasoner.jobs.job import RankedCandidate
from reasoner.search.search import Search
from reasoner.tree import Node

Samples = Annotated[int, Field(ge=1, le=MAX_N, description="Solutions to sample.")]
Steps = Annotated[int, Field(ge=1, le=256, description="Steps after which the search ends.")]

MIN_NEW_PROBABILITY = 0.2
"""Minimum probability that another sample of a step is new; duplicates cost tokens without a benefit."""


class Params(StrictModel):
    """Parameters of a strategy, from which its REST schema and command-line options are generated."""

    @property
    def members(self) -> Mapping[str, str]:
        """The models that the parameters name, by parameter: each must be one of the job's."""
        return {}

    @property
    def calibration_family(self) -> str | None:
        """The family of tasks whose part of a calibration the search reads; ``None`` for what is common to all."""
        return None


@dataclass(frozen=True, slots=True)
class AnswerLeader:
    """The best solution that states one answer; ``share``, ``None`` without a vote, is the answer's of all samples."""

    node: Node
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy's result: the chosen leaf, its confidence (0 to 1), and the votes if there was a vote."""

    node: Node | None
    confidence: float | None = None
    votes: list[Vote] = field(default_factory=list)
    abstained: int | None = None
    """Number of samples that have ended without a vote; ``None`` without a vote."""
    leaders: Sequence[AnswerLeader] | None = None
    """The best solution of each answer of a vote, by falling share; ``None`` without a vote."""
    standings: Sequence[Mapping[str, Any]] = ()
    """The strengths of the solutions of a tournament, strongest first."""
    ranking: Sequence[RankedCandidate] = ()
    """The client's own candidates, best first."""


class VerifierUse(StrEnum):
    """The use that a strategy makes of the job's verifier."""

    NONE = "none"
    OPTIONAL = "optional"
    """Scores of finished solutions if there is a verifier; it works without."""
    SCORES = "scores"
    """Scores of finished solutions."""
    STEP_SCORES = "step_scores"
    """Scores of unfinished solutions too, which some verifiers do not give."""
    COMPARISONS = "comparisons"
    """Comparisons of two solutions."""

    @property
    def needs_scores(self) -> bool:
        return self in (VerifierUse.SCORES, VerifierUse.STEP_SCORES)


class DecidedBy(StrEnum):
    """The rule by which a solution becomes the result."""

    VOTE = "vote"
    """The candidates' answers are compared and counted."""
    BEST = "best"
    """One solution is the best: the one with the highest score, the strongest, or the only one."""


class Feature(StrEnum):
    """A part of a job that only some strategies can handle."""

    CONSTRAINT = "constraint"
    """Solutions are held to a language: the strategy writes them, and adds no text of its own."""
    SEVERAL_MODELS = "several_models"
    """Solutions of several policies (``JobSpec.models``)."""
    EARLY_STOP = "early_stop"
    """``JobSpec.confidence`` stops the search early."""
    CANDIDATES = "candidates"
    """The client's own solutions are ranked, and none is written."""


P = TypeVar("P", bound=Params)


@dataclass(frozen=True, slots=True, eq=False)
class Strategy(Generic[P]):
    """A search strategy. ``run`` must depend only on its arguments and the search's results, as replays require."""

    name: str
    params: type[P]
    run: Callable[[Search, P], Awaitable[Choice]]
    verifier: VerifierUse | Callable[[P], VerifierUse] = VerifierUse.NONE
    """Its use of the verifier, or a function that returns it where that depends on the parameters."""
    decided_by: DecidedBy = DecidedBy.BEST
    requires: Set[Capability] = frozenset()
    """Capabilities that it needs of the policy's server; with scores of steps also ``continuation``."""
    supports: Set[Feature] = frozenset({Feature.CONSTRAINT})
    scores_steps: Callable[[P], bool] | None = None
    """Function that returns True where the parameters let one that needs scores also score unfinished solutions."""

    @property
    def needs_verifier(self) -> bool:
        """True if it needs scores, whatever its parameters."""
        return isinstance(self.verifier, VerifierUse) and self.verifier.needs_scores

    def list_needs(
        self, params: P | None = None, *, is_constrained: bool = False, counts_tokens: bool = False
    ) -> frozenset[Capability]:
        """Return what the strategy needs of the policy's server, whatever its parameters or with these.

        ``is_constrained``: solutions are held to a language; ``counts_tokens``: they are sampled with penalties.
        """
        needs = set(self.requires)
        use = self.verifier if params is None else self.verifier_use(params)
        if use is VerifierUse.STEP_SCORES:
            needs.add(Capability.CONTINUATION)
        if is_constrained and Capability.CONTINUATION in needs:
            needs.add(Capability.CONSTRAINT_CONTINUATION)
        if counts_tokens and Capability.CONTINUATION in needs:
            needs.add(Capability.PENALTY_CONTINUATION)
        return frozenset(needs)

    @property
    def constraint_needs(self) -> frozenset[Capability] | None:
        """Its needs for solutions that are held to a language; ``None`` if no constraint can hold its solutions."""
        return self.list_needs(is_constrained=True) if Feature.CONSTRAINT in self.supports else None

    def verifier_use(self, params: P) -> VerifierUse:
        """Return what the strategy asks of the job's verifier with these parameters."""
        if self.scores_steps is not None and self.scores_steps(params):
            return VerifierUse.STEP_SCORES
        return self.verifier if isinstance(self.verifier, VerifierUse) else self.verifier(params)

    def parse(self, params: Mapping[str, Any]) -> P:
        """Return the validated parameters with defaults. Raises ``ValueError`` that names the fault."""
        try:
            return self.params.model_validate(params)
        except ValidationError as error:
            known = ", ".join(self.params.model_fields) or "none"
            problems = "; ".join(
                f"{'.'.join(map(str, problem['loc'])) or 'parameters'}: {problem['msg']}" for problem in error.errors()
            )
            raise ValueError(f"strategy {self.name!r}: {problems} (its parameters: {known})") from None


def read_answer(solution: Node) -> str:
    """Return a solution without its thought; empty if nothing follows it."""
    text = (solution.answer_text if solution.thought is not None else strip_thinking(solution.solution)) or ""
    return text if text == solution.solution else text.lstrip("\n")


async def expand_and_score(search: Search, parents: Sequence[Node], n: int | Sequence[int]) -> list[Node]:
    """Sample next steps, ``n`` (or ``n[i]``) of each parent, and return them with their scores."""
    level: list[Node] = []
    async for arrived in search.expand(parents, n):
        await search.score(arrived)
        level += arrived
    return level


def choose_best_scored(nodes: Sequence[Node]) -> Choice:
    """Return the candidate with the highest score, of equal ones a strict answer; those without a score rank last."""
    if not nodes:
        return Choice(None)
    best = max(nodes, key=lambda node: (-1.0 if node.score is None else node.score, node.answer_level == "strict"))
    return Choice(best, best.score)


def weigh_by_score(nodes: Sequence[Node]) -> dict[Node, float]:
    """Return the votes of candidates by their scores: one without a score has none, unless all are without."""
    is_scored = any(node.score is not None for node in nodes)
    return {node: (node.score or 0.0) if is_scored else 1.0 for node in nodes}


async def choose_by_majority(
    search: Search, nodes: Sequence[Node], weights: dict[Node, float], sampled: Iterable[Node] | None = None
) -> Choice:
    """Return the heaviest class of equivalent answers: its heaviest member is the leaf, its share the confidence.

    ``sampled``: the samples of which the voters are some, by default all of the tree.
    """
    groups = await group_equivalent(nodes, search.spec.answer, search.equivalence)
    abstained = count_abstained(search.root.walk() if sampled is None else sampled, nodes)
    choice = elect(count_votes(groups, weights), weights, abstained)
    is_fact = search.spec.has_conclusive_verifier and choice.node is not None and choice.node.score == 1.0
    return replace(choice, confidence=1.0) if is_fact else choice  # whoever is silent


def count_abstained(sampled: Iterable[Node], voters: Collection[Node]) -> int:
    """Return the number of samples that have ended without an answer, or with a flexible one that has no vote."""
    has_strict = any(node.answer_level == "strict" for node in voters)
    silent = {node for node in sampled if node.has_ended and node.is_solution}.difference(voters)
    return sum(node.answer is None or (has_strict and node.answer_level == "flexible") for node in silent)


def elect(counted: Sequence[tuple[Vote, list[Node]]], weights: dict[Node, float], abstained: int = 0) -> Choice:
    """Return the winner of a vote whose classes are sorted, heaviest first.

    Shares are those of all samples: each that has abstained weighs as much as a vote on average.
    """
    if not counted:
        return Choice(None, abstained=abstained)
    num_votes = sum(len(members) for _, members in counted)
    total = sum(vote.weight for vote, _ in counted) * (num_votes + abstained) / num_votes
    shares = [vote.weight / total if total > 0 else None for vote, _ in counted]
    best = [max(members, key=lambda member: (weights[member], member.score is not None)) for _, members in counted]
    leaders = [AnswerLeader(node, share) for node, share in zip(best, shares, strict=True)]
    return Choice(best[0], shares[0], votes=[vote for vote, _ in counted], abstained=abstained, leaders=leaders)
