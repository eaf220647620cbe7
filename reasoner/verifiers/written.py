"""The budget of verdicts that a language model writes, for verifiers of solutions and of pairs alike."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from engine.protocol.types import InvalidRequest, ModelInfo, SamplingParams, Tokens
from prm.formats.base import as_text
from prm.scorers.templates import PromptTemplate, TemplateRefused, Value
from prm.scorers.verdict_formats import VerdictFormat
from prm.scorers.verdicts import Verdict, VerdictCost, VerdictOptions, VerdictWriter
from reasoner.budget.ledger import Ledger
from reasoner.budget.prices import Amount
from reasoner.budget.usage import Usage
from reasoner.deadline import run_within
from reasoner.jobs.verifier_specs import Criterion, WrittenVerifier
from reasoner.verifiers.context import VerifierContext

T = TypeVar("T")


class ParseTemplate(Protocol):
    """Function that checks a template. Raises ``TemplateRefused``."""

    def __call__(self, source: str, *, has_criteria: bool) -> PromptTemplate: ...


_MAX_CRITIQUE_TOKENS = 512
_CONTEXT_SHARE = 4
"""By default a critique takes at most this fraction of the context, as its reciprocal."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt for verdicts. ``key`` names it within the job."""

    key: str
    prompt: Tokens


@dataclass(frozen=True, slots=True)
class Judgement(Generic[T]):
    """An item with the verdicts on its questions, in their order, and what they cost."""

    item: T
    verdicts: tuple[Verdict, ...]
    spend: Usage
    reserved: Amount


class BudgetedVerdicts:
    """Asks for verdicts within a ledger. What a request could take without any cached prefix is reserved before it."""

    def __init__(
        self,
        problem: str,
        template: PromptTemplate,
        rubric: Sequence[Criterion],
        writer: VerdictWriter,
        ledger: Ledger,
    ) -> None:
        self._problem = problem
        self._template = template
        self._criteria: Sequence[Criterion | None] = rubric or [None]
        self._writer = writer
        self._ledger = ledger
        self._rate = ledger.rate_of_model(writer.info)
        self._questions: dict[str, Question] = {}
        """Questions by key: items that the budget did not reach are asked about again."""

    async def ask(self, key: str, values: Mapping[str, Value]) -> list[Question]:
        """Return the questions about a solution or a pair, one for each criterion; ``key`` names them in the job."""
        return [await self._ask_by(criterion, key, values) for criterion in self._criteria]

    async def _ask_by(self, criterion: Criterion | None, key: str, values: Mapping[str, Value]) -> Question:
        name, text = ("", "") if criterion is None else (criterion.name, criterion.text)
        key = f"{key}:{name}"
        if key not in self._questions:
            prompt = self._template.render({"question": self._problem, "criterion": text, **values})
            self._questions[key] = Question(key, await self._writer.encode(prompt))
        return self._questions[key]

    async def check_fits(self, values: Mapping[str, Value]) -> None:
        """Raise ``InvalidRequest`` if the prompt with these empty values leaves no room for a critique."""
        for question in await self.ask("empty", values):
            if not self._writer.fits(question.prompt):
                longest, info = self._writer.options.max_tokens, self._writer.info
                raise InvalidRequest(
                    f"verifier.max_tokens: the prompt has {len(question.prompt)} tokens without any solution, a "
                    f"critique up to {longest}, and the context of model {info.id!r} holds {info.context}: give fewer, "
                    "or a shorter template",
                    "verifier.max_tokens",
                )

    async def read(self, questions: Mapping[T, Sequence[Question]]) -> list[Judgement[T]]:
        """Return the verdicts on the questions of the first items, as many as the budget reaches.

        Empty if it reaches none, or the time is up before the model has answered. A question that is too long for the
        model has a verdict without votes.
        """
        amounts = self._reserve_affordable({item: self._max_amount(own) for item, own in questions.items()})
        if not amounts:
            return []
        work = partial(self._read_all, {item: questions[item] for item in amounts})
        try:
            verdicts = await run_within(self._ledger.seconds_until_cut(), work)
        except BaseException:
            self._release(amounts)
            raise
        if verdicts is None:
            self._release(amounts)
            return []
        return [Judgement(item, found, self._spend(found), amounts[item]) for item, found in verdicts.items()]

    async def _read_all(self, questions: Mapping[T, Sequence[Question]]) -> dict[T, tuple[Verdict, ...]]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    item: [group.create_task(self._read_one(question)) for question in own]
                    for item, own in questions.items()
                }
        except* Exception as errors:
            raise errors.exceptions[0] from None
        return {item: tuple(task.result() for task in own) for item, own in tasks.items()}

    async def _read_one(self, question: Question) -> Verdict:
        if not self._writer.fits(question.prompt):
            return Verdict((), (), VerdictCost())
        try:
            return await self._writer.write(question.prompt, question.key)
        except InvalidRequest as error:  # such as a filter's, of this text alone
            if error.field == "model":
                raise
            return Verdict((str(error),), (None,), VerdictCost())

    def _max_amount(self, questions: Sequence[Question]) -> Amount:
        costs = [self._writer.max_cost(question.prompt) for question in questions if self._writer.fits(question.prompt)]
        total = sum(costs, start=VerdictCost())
        return self._rate.max_verification_amount(total.computed, total.generated)

    def _reserve_affordable(self, amounts: Mapping[T, Amount]) -> dict[T, Amount]:
        """Reserve the amounts of the first items, as many as the budget reaches, and return them."""
        reserved: dict[T, Amount] = {}
        for item, amount in amounts.items():
            if self._ledger.is_exhausted or self._ledger.max_affordable(amount) < 1:
                break
            self._ledger.reserve(amount)
            reserved[item] = amount
        return reserved

    def _release(self, amounts: Mapping[T, Amount]) -> None:
        for amount in amounts.values():
            self._ledger.release(amount)

    def _spend(self, verdicts: Sequence[Verdict]) -> Usage:
        cost = sum((verdict.cost for verdict in verdicts), start=VerdictCost())
        return self._rate.verification_usage(cost.computed, cost.cached, cost.generated)


def find_model(context: VerifierContext) -> ModelInfo:
    """Return the model that writes the verdicts: the job's own if the verifier names none.

    Raises ``InvalidRequest`` if it is not served.
    """
    verifier = context.spec.verifier
    assert isinstance(verifier, WrittenVerifier)
    return context.policy if verifier.model is None else context.verifier_model()


async def open_verdicts(
    context: VerifierContext, model: ModelInfo, verdict_format: VerdictFormat, parse_template: ParseTemplate
) -> BudgetedVerdicts:
    """Open a verifier's model.

    Raises ``InvalidRequest`` for a template that ``parse_template`` refuses, and labels or a server with which the
    model cannot be asked.
    """
    verifier = context.spec.verifier
    assert isinstance(verifier, WrittenVerifier)
    try:
        template = parse_template(verdict_format.template, has_criteria=bool(verifier.rubric))
    except TemplateRefused as error:
        raise InvalidRequest(f"verifier.template: model {model.id!r}: {error}", "verifier.template") from None
    own = model.sampling | ({} if verifier.temperature is None else {"temperature": verifier.temperature})
    sampling = SamplingParams(
        temperature=own.get("temperature", 1.0),
        top_k=int(own.get("top_k", 0)),
        top_p=own.get("top_p", 1.0),
        min_p=own.get("min_p", 0.0),
        stop=verdict_format.stops,
    )
    longest = verifier.max_tokens
    if longest is None:
        longest = min(_MAX_CRITIQUE_TOKENS, model.context // _CONTEXT_SHARE)
    options = VerdictOptions(verifier.votes, longest, sampling)
    seed = context.spec.seed
    writer = await VerdictWriter.open(
        context.engine, model, verdict_format, options, seed=seed, pin_key=context.pin_key
    )
    question = as_text(context.spec.rendered_conversation)
    return BudgetedVerdicts(question, template, rubric=verifier.rubric, writer=writer, ledger=context.ledger)


def weigh_criteria(criteria: Sequence[Criterion], scores: Sequence[float | None]) -> float | None:
    """Return the weighted mean of the criteria's scores; ``None`` if one of them has none."""
    if any(score is None for score in scores):
        return None
    weights = [criterion.weight for criterion in criteria] or [1.0] * len(scores)
    total = sum(weight * score for weight, score in zip(weights, scores, strict=True) if score is not None)
    return total / sum(weights)


def shorten(verdict: Verdict) -> dict[str, object]:
    """Return a verdict as the journal keeps it."""
    return {"score": verdict.score, "votes": list(verdict.scores), "critiques": list(verdict.critiques)}
