"""The policies of a search: the models that write its solutions, their prompts, and their shares of the samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from engine.protocol.request_checks import PromptTooLong, count_thought_pages
from engine.protocol.types import Capability, EngineClient, ModelInfo, TokenizeRequest, Tokens
from reasoner.jobs.sampling_spec import Sampling
from reasoner.jobs.spec import JobSpec
from reasoner.search.policies.forced_calls import choose_natively
from reasoner.thoughts import ThoughtFormat


@dataclass(frozen=True, slots=True)
class Policy:
    """A model that writes solutions. ``sampling`` has a value for each of its parameters."""

    model: ModelInfo
    sampling: Sampling
    thoughts: ThoughtFormat | None = None
    """Delimiters of its thoughts; ``None`` if it has none."""
    weight: float = 1.0
    """Its share of the samples, relative to the other policies' weights."""
    wait_seconds: float = 0.0
    """Seconds for which its server may be away before a search with other policies goes on without it."""
    reads_probe: bool = False
    """True if the engine reads its probe at the end of each branch."""

    @property
    def can_continue(self) -> bool:
        """True if its server can go on after the beginning of a solution."""
        needs = {Capability.CONTINUATION}
        if self.sampling.counts_tokens:
            needs.add(Capability.PENALTY_CONTINUATION)
        return needs <= self.model.capabilities


def spread_samples(weights: Sequence[float]) -> Iterator[int]:
    """Yield the index of each sample's policy, so that after any number of samples each has its share.

    No policy is ever more than one sample ahead of its share or behind it (smooth weighted round robin).
    """
    total, credit = sum(weights), [0.0] * len(weights)
    while True:
        credit = [own + weight for own, weight in zip(credit, weights, strict=True)]
        chosen = max(range(len(weights)), key=credit.__getitem__)
        credit[chosen] -= total
        yield chosen


def count_samples(weights: Sequence[float], start: int, end: int) -> list[int]:
    """Return for each policy the number of the samples from ``start`` to ``end`` that are its own."""
    chosen = list(islice(spread_samples(weights), start, end))
    return [chosen.count(policy) for policy in range(len(weights))]


def find_sample_number(weights: Sequence[float], policy: int, index: int) -> int:
    """Return the number, among all samples, of the sample with this index among those of its policy."""
    numbers = (number for number, chosen in enumerate(spread_samples(weights)) if chosen == policy)
    return next(islice(numbers, index, None))


async def render_problem(spec: JobSpec, engine: EngineClient, policy: ModelInfo) -> Tokens:
    """Return the prompt of the job's question, however long it is."""
    variables = spec.template_kwargs | choose_natively(spec, policy)
    return await engine.tokenize(TokenizeRequest(policy.id, spec.to_messages(), template_kwargs=variables))


async def tokenize_problem(spec: JobSpec, engine: EngineClient, policy: ModelInfo) -> Tokens:
    """Return the prompt of the job's question.

    Raises ``PromptTooLong`` if it leaves no room for an answer, and ``InvalidRequest`` if a bound on keys leaves none
    for a thought.
    """
    prompt = await render_problem(spec, engine, policy)
    if spec.candidates is None:  # else nothing is written behind it
        check_room(prompt, policy)
        if spec.sampling.kv_budget is not None:
            count_thought_pages(spec.sampling.kv_budget, len(prompt), policy.page_size)
    return prompt


def check_room(prompt: Tokens, policy: ModelInfo) -> None:
    """Raise ``PromptTooLong`` if the prompt of the question fills a policy's context."""
    if len(prompt) >= policy.context:
        raise PromptTooLong(
            f"the problem has {len(prompt)} tokens, and the context of model {policy.id!r} holds {policy.context}: "
            "shorten it so that room is left for an answer",
            "problem",
        )
