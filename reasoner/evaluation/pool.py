"""One pool of samples per problem and seed, and the evaluation of strategies on subsamples of it.

Voting and best-of-n are different decisions on the same samples. So the samples are generated and scored once, at the
largest n, and each strategy's own code runs on many subsamples of size n without replacement, with a search that takes
its branches from the pool. Accuracies of different strategies and n then differ by the decisions alone.

Each subsample is billed like a separate job. The pool returns branches like an engine that decodes all of them in
lockstep: by length, counted from the request. A strategy that stops early pays for the tokens that its unfinished
branches had by then.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from engine.protocol.types import Token, Tokens
from reasoner.answers.equivalence import Equivalence
from reasoner.budget.ledger import Ledger
from reasoner.budget.usage import Usage
from reasoner.evaluation.plan import CEILING, StrategyCase
from reasoner.evaluation.runs import Run
from reasoner.evaluation.statistics import pass_at_n
from reasoner.jobs.spec import JobSpec
from reasoner.search.search import Search
from reasoner.search.stream import Stream
from reasoner.strategies.registry import STRATEGIES, parse_params
from reasoner.tree import Node, Reason

NUM_DRAWS = 64
"""Number of subsamples for each strategy and n."""
NUM_FULL_DRAWS = 8
"""Number of permutations of the pool for n equal to its size."""
MEASURED = (
    "correct", "reached", "answered", "samples", "tokens", "thought_tokens", "verifier_tokens", "correct_strict",
    "flexible",
)  # fmt: skip
"""Fields of ``Run`` that ``PoolSearch.measure`` returns."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A solution of the pool.

    ``prefixes`` are ids of the prefixes of its tokens. Two samples have as many ids in common as leading tokens, which
    a verifier computes once.
    """

    node: Node
    right: bool
    reason: Reason | None
    scores: tuple[float, ...]
    score: float | None
    prefixes: frozenset[int]


@dataclass(frozen=True, slots=True)
class SamplePool:
    """The samples of one problem with one seed, and their total usage."""

    spec: JobSpec
    root: Node
    samples: tuple[Sample, ...]
    usage: Usage
    parameters: tuple[int, int]
    """Number of weights of the policy and of the verifier."""
    verifier_cost: tuple[float, float]
    """Tokens of the question, and the fraction of the samples' shared tokens that the verifier's cache saved.

    A cache shares whole pages only; the fraction reproduces the bill of the whole pool.
    """
    verdict_tokens: float | None = None
    """Tokens that a verifier which writes or grades took for one solution, on average; others read shared prefixes."""

    @classmethod
    def of(cls, search: Search, right: Mapping[Node, bool], parameters: tuple[int, int]) -> SamplePool:
        """Create from finished children of a search's root; ``right`` names them and marks the correct ones."""
        ids: dict[tuple[int, Token], int] = {}
        nodes = sorted(right, key=lambda node: node.path)  # independent of the order of arrival
        samples = tuple(
            Sample(
                node,
                right[node],
                reason=node.reason,
                scores=node.scores,
                score=node.score,
                prefixes=_prefix_ids(node.completion_ids, ids),
            )
            for node in nodes
        )
        scored = [sample.prefixes for sample in samples if sample.score is not None]
        length = sum(map(len, scored))
        shared = length - len(frozenset[int]().union(*scored))
        usage, question = search.ledger.usage, len(search.root.prefix)
        if not shared:
            cost = (float(usage.verifier_computed - length), 0.0)
        else:
            cost = (float(question), (question + length - usage.verifier_computed) / shared)
        verifier = search.spec.verifier
        by_solution = usage.verifier_generated > 0 or (verifier is not None and verifier.is_billed_by_solution)
        verdict = usage.verifier_computed / len({max(text) for text in scored}) if by_solution and scored else None
        return cls(search.spec, search.root, samples, usage, parameters, cost, verdict)


def _prefix_ids(tokens: Tokens, ids: dict[tuple[int, Token], int]) -> frozenset[int]:
    prefixes, prefix = [], 0
    for token in tokens:
        prefix = ids.setdefault((prefix, token), len(ids) + 1)
        prefixes.append(prefix)
    return frozenset(prefixes)


class NotInPool(ValueError):
    """The strategy needs an operation that a pool of samples does not support, so it has to run live."""


class PoolSearch(Search):
    """A search whose branches come from a subsample of the pool, billed as if they had been generated."""

    def __init__(self, pool: SamplePool, subsample: Sequence[Sample], equivalence: Equivalence) -> None:
        self.spec = pool.spec
        self.ledger = Ledger(pool.spec.budget)
        self.equivalence = equivalence
        self.root = Node(path=(), parent=None, prefix=pool.root.prefix)
        self.roots, self._weights = [self.root], [1.0]
        self.tokens = 0
        self.thought_tokens = 0
        self.begun: list[Sample] = []
        """Samples that the strategy has requested."""
        self._left = list(reversed(subsample))
        self._of = {sample.node: sample for sample in subsample}
        self._scored_prefixes: set[int] = set()
        self._scored_texts: set[int] = set()
        self._question, self._spared = pool.verifier_cost
        self._verdict_tokens = pool.verdict_tokens
        self._computes_scores = pool.usage.verifier_computed > 0
        self._scored_tokens = 0

    @property
    def verifier_tokens(self) -> float:
        """Tokens that the verifier would have computed for the scored branches."""
        if self._verdict_tokens is not None:
            return self._verdict_tokens * len(self._scored_texts)
        if not self._computes_scores:  # a probe reads what decoding has computed
            return 0.0
        shared = self._scored_tokens - len(self._scored_prefixes)
        return self._question + self._scored_tokens - self._spared * shared if self._scored_tokens else 0.0

    @property
    def is_budget_exhausted(self) -> bool:
        return False

    def rng(self, node: Node, purpose: str = "") -> random.Random:
        return random.Random(f"{self.spec.seed}/{node.id}/{purpose}")

    def measure(self, chosen: Node | None) -> tuple[float, ...]:
        """Return the values of ``MEASURED`` after the strategy has chosen."""
        return (
            chosen is not None and self._of[chosen].right,
            any(self._of[node].right for node in self.root.children),
            chosen is not None,
            len(self.begun),
            self.tokens,
            self.thought_tokens,
            self.verifier_tokens,
            chosen is not None and self._of[chosen].right and chosen.answer_level == "strict",
            chosen is not None and chosen.answer_level == "flexible",
        )

    def take(self) -> Node | None:
        """Return the next branch of the subsample, reset to its initial state; ``None`` if none is left."""
        if not self._left:
            return None
        sample = self._left.pop()
        node, index = sample.node, len(self.begun)
        node.path, node.parent, node.reason = (index,), self.root, sample.reason
        node.scores, node.score = (), None
        self.begun.append(sample)
        return node

    def stream(self) -> Stream:
        return PoolStream(self)

    async def score(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            sample = self._of[node]
            if sample.score is not None and node.score is None:
                node.scores, node.score = sample.scores, sample.score
                self.bill_score(sample)

    def bill_score(self, sample: Sample) -> None:
        """Add what the verifier takes for a sample, if it gave it a score."""
        if sample.score is not None:
            self._scored_prefixes |= sample.prefixes
            self._scored_texts.add(max(sample.prefixes))  # ids rise along a text
            self._scored_tokens += len(sample.prefixes)

    async def prune(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            node.reason = "pruned"


class PoolStream(Stream):
    """Returns the branches of a subsample in the order in which they would end if all were decoded in lockstep."""

    def __init__(self, search: PoolSearch) -> None:
        self._search = search
        self._running: list[tuple[int, int, Node]] = []
        """Heap of (end time in tokens, order, branch)."""
        self._now = 0

    def complete(
        self, parents: Sequence[Node], n: int | Sequence[int], *, confidence: int | None = None, **options: Any
    ) -> int:
        if any(options.values()) or any(parent is not self._search.root for parent in parents):
            raise NotInPool("a pool holds samples of whole solutions, without monitoring")
        count = n * len(parents) if isinstance(n, int) else sum(n)
        for begun in range(count):
            node = self._search.take()
            if node is None:
                return begun
            if confidence is not None and node.tokens and not node.confidence:
                raise NotInPool("the samples of this pool have no token confidences")
            heapq.heappush(self._running, (self._now + node.tokens, len(self._search.begun), node))
        return count

    def expand(self, parents: Sequence[Node], n: int | Sequence[int], **options: Any) -> int:  # noqa: ARG002
        raise NotInPool("a pool holds whole solutions, not steps")

    async def __aenter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Node]:
        if not self._running:
            raise StopAsyncIteration
        self._now, _, node = heapq.heappop(self._running)
        self._search.root.children.append(node)
        self._bill(node, node.tokens)
        return [node]

    async def __aexit__(self, *_error: object) -> None:
        for ends, _, node in self._running:
            self._bill(node, node.tokens - (ends - self._now))
        self._running.clear()

    def _bill(self, node: Node, tokens: int) -> None:
        """Add the first ``tokens`` of a branch, without the output of tools."""
        self._search.tokens += max(0, tokens - node.output_tokens)
        self._search.thought_tokens += min(tokens, node.thought_tokens)


def sample_subsets(size: int, n: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield subsamples of ``n`` out of ``size`` indices without replacement.

    They are consecutive slices of random permutations, so that each sample occurs about equally often.
    """
    count = NUM_DRAWS if n < size else NUM_FULL_DRAWS
    while True:
        order = rng.sample(range(size), size)
        for start in range(0, size - n + 1, n):
            if count == 0:
                return
            count -= 1
            yield order[start : start + n]


async def decide(
    pool: SamplePool,
    problem: str,
    seed: int,
    cases: Sequence[tuple[StrategyCase, Sequence[int]]],
    ceiling: Sequence[int],
    equal: Equivalence,
) -> list[Run]:
    """Run every case at each of its n on the same subsamples of the pool, and compute pass@n."""
    runs = [_compute_ceiling(pool, problem, seed, n) for n in ceiling]
    for case, ns in cases:
        strategy = STRATEGIES[case.name]
        for n in ns:
            params = parse_params(case.name, {key: value for key, value in case.to_spec(n).items() if key != "name"})
            measured = []
            for indices in sample_subsets(len(pool.samples), n, random.Random(f"{seed}/{problem}/{n}")):
                search = PoolSearch(pool, [pool.samples[index] for index in indices], equal)
                choice = await strategy.run(search, params)
                measured.append(search.measure(choice.node))
            columns = zip(MEASURED, zip(*measured, strict=True), strict=True)
            means = {name: sum(values) / len(values) for name, values in columns}
            cost = _compute_cost(pool, means["tokens"], means["verifier_tokens"])
            runs.append(Run(pool.spec.model or "", case.label, n=n, seed=seed, problem=problem, **means, **cost))
    return runs


def _compute_ceiling(pool: SamplePool, problem: str, seed: int, n: int) -> Run:
    model, size = pool.spec.model or "", len(pool.samples)
    reached = pass_at_n(n, size, sum(sample.right for sample in pool.samples))
    answered = pass_at_n(n, size, sum(sample.node.answer is not None for sample in pool.samples))
    strict = [sample for sample in pool.samples if sample.node.answer_level == "strict"]
    correct_strict = pass_at_n(n, size, sum(sample.right for sample in strict))
    flexible = answered - pass_at_n(n, size, len(strict))
    tokens = n * sum(sample.node.tokens - sample.node.output_tokens for sample in pool.samples) / size
    thought_tokens = n * sum(sample.node.thought_tokens for sample in pool.samples) / size
    cost = _compute_cost(pool, tokens, 0.0)
    return Run(
        model,
        CEILING,
        n=n,
        seed=seed,
        problem=problem,
        correct=reached,
        reached=reached,
        answered=answered,
        samples=n,
        tokens=tokens,
        thought_tokens=thought_tokens,
        verifier_tokens=0.0,
        correct_strict=correct_strict,
        flexible=flexible,
        **cost,
    )


def _compute_cost(pool: SamplePool, tokens: float, verifier_tokens: float) -> dict[str, float]:
    policy, verifier = pool.parameters
    share = (tokens + verifier_tokens) / max(1, pool.usage.total)
    return {
        "flops": 2.0 * policy * (len(pool.root.prefix) + tokens) + 2.0 * verifier * verifier_tokens,
        "seconds": pool.usage.seconds * share,
    }
