"""Options of ``reasoner eval`` that say what is measured: strategies, models, numbers of samples, budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from api.cli.job_options import parse_word_or_json
from reasoner.base_model import VerifierSpec
from reasoner.evaluation.matched.plan import MatchedPlan, Quantity, parse_budgets
from reasoner.evaluation.plan import (
    GREEDY,
    MAJORITY,
    EvaluationPlan,
    StrategyCase,
    parse_cases,
    parse_counts,
    split_pooled_and_live,
)
from reasoner.jobs.verifier_specs import PrmVerifier, Verifier
from workers.config.settings import Settings
from workers.config.types import served_name

_VERIFIERS: TypeAdapter[VerifierSpec] = TypeAdapter(Verifier)
DEFAULT_COUNTS = "1,4,16,64"
_BUDGETS = {
    Quantity.TOKENS: "500,2000,8000",
    Quantity.SECONDS: "1,4,16",
    Quantity.FLOPS: "1e9,4e9",
    Quantity.COST: "0.001,0.004",
}
"""Examples of budgets."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The strategies, models and verifier to measure, and the numbers of samples and runs."""

    strategy: Annotated[
        str, typer.Option(help="all, or a list separated by commas of NAME or NAME:KEY=VALUE:KEY=VALUE.")
    ] = "all"
    n: Annotated[
        str | None, typer.Option("--n", help=f"Numbers of samples, separated by commas; default: {DEFAULT_COUNTS}.")
    ] = None
    live_n: Annotated[
        str | None,
        typer.Option("--live-n", help="Numbers of samples of strategies that cannot share a pool; default: --n."),
    ] = None
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs of every problem, each with another seed.")] = 1
    against: Annotated[
        list[str] | None, typer.Option(help="A larger model, run greedily and compared at equal FLOPs. Repeatable.")
    ] = None
    mixed: Annotated[
        list[str] | None, typer.Option("--with", help="A further model to sample from, in the same search. Repeatable.")
    ] = None
    verifier: Annotated[
        str | None,
        typer.Option(help="Verifier: its kind, or the field of a job as JSON; default: the model's own."),
    ] = None

    def build(self, settings: Settings, verifier: VerifierSpec | None) -> EvaluationPlan:
        """Return the plan. Raises ``typer.BadParameter``."""
        counts = _parse_counts("--n", self.n or DEFAULT_COUNTS)
        live_counts = counts if self.live_n is None else _parse_counts("--live-n", self.live_n)
        pooled, live = self.parse_cases(verifier)
        against, mixed = (tuple(served_name(value) for value in given or ()) for given in (self.against, self.mixed))
        return EvaluationPlan(
            settings.model_name,
            pooled,
            live=live,
            ns=counts,
            live_ns=live_counts,
            seeds=self.seeds,
            against=against,
            mixed=mixed,
        )

    def parse_cases(self, verifier: VerifierSpec | None) -> tuple[tuple[StrategyCase, ...], tuple[StrategyCase, ...]]:
        """Return the cases that decide on a pool, and those that run live. Raises ``typer.BadParameter``."""
        has_verifier = verifier is not None and verifier.can_score()
        try:
            cases = parse_cases(self.strategy, has_verifier=has_verifier)
            return split_pooled_and_live(cases, has_several_models=bool(self.mixed))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--strategy") from None

    def list_more_models(self, settings: Settings, verifier: VerifierSpec | None) -> dict[str, str]:
        """Return the models to serve besides the policy, each with the option that names it."""
        more = dict.fromkeys(self.against or (), "--against") | dict.fromkeys(self.mixed or (), "--with")
        scorer = getattr(verifier, "model", None)
        if scorer is not None and scorer not in settings.local_models():
            more.setdefault(scorer, "--verifier")
        return more

    def parse_verifier(self) -> VerifierSpec | None:
        """Return the verifier, ``None`` for the model's own. Raises ``typer.BadParameter``."""
        given = parse_word_or_json("verifier", self.verifier)
        if given is None:
            return None
        try:
            verifier = _VERIFIERS.validate_python({"kind": given} if isinstance(given, str) else given)
        except ValidationError as error:
            places = [(".".join(map(str, fault["loc"][1:])), fault["msg"]) for fault in error.errors()]
            faults = "; ".join(f"{place}: {message}" if place else message for place, message in places)
            raise typer.BadParameter(faults, param_hint="--verifier") from None
        return None if verifier == PrmVerifier() else verifier


@dataclass(frozen=True, slots=True)
class MatchedOptions:
    """The budgets of an evaluation in which every strategy may spend the same."""

    matched: Annotated[
        Quantity | None, typer.Option(help="Give every strategy the same --budget of this quantity for each problem.")
    ] = None
    budget: Annotated[str | None, typer.Option(help="With --matched: amounts, separated by commas.")] = None
    baseline: Annotated[
        str, typer.Option(help="With --matched: the strategy with which the others are compared at each budget.")
    ] = MAJORITY

    def build(self, options: PlanOptions, settings: Settings, verifier: VerifierSpec | None) -> MatchedPlan:
        """Return the plan for the quantity. Raises ``typer.BadParameter``."""
        assert self.matched is not None
        unused = {"--n": options.n, "--live-n": options.live_n, "--against": options.against, "--with": options.mixed}
        for option, value in unused.items():
            if value:
                raise typer.BadParameter("a budget says how many samples there are, of one model", param_hint=option)
        if self.budget is None:
            example = _BUDGETS[self.matched]
            raise typer.BadParameter(f"it needs --budget, such as {example}", param_hint="--matched")
        if self.matched is Quantity.COST and settings.model_name not in settings.prices:
            raise typer.BadParameter(
                f"model {settings.model_name!r} has no prices: write [models.{settings.model_name}.prices] with "
                "prompt, cached and generated, per million tokens, into reasoner.toml",
                param_hint="--matched",
            )
        try:
            budgets = parse_budgets(self.matched, self.budget)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--budget") from None
        pooled, live = options.parse_cases(verifier)
        if not any(case.label == MAJORITY for case in pooled):
            pooled = (StrategyCase(MAJORITY, MAJORITY), *pooled)
        known = [case.label for case in (*pooled, *live) if case.name != GREEDY]
        if self.baseline not in known:
            raise typer.BadParameter(
                f"no strategy {self.baseline!r} is measured: {', '.join(known)}", param_hint="--baseline"
            )
        return MatchedPlan(
            settings.model_name,
            self.matched,
            budgets=budgets,
            pooled=pooled,
            live=tuple(case for case in live if case.name != GREEDY),
            baseline=self.baseline,
            seeds=options.seeds,
        )


def _parse_counts(option: str, text: str) -> tuple[int, ...]:
    try:
        return parse_counts(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
