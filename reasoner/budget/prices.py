"""The cost of a token: FLOPs by the size of the model, money by the operator's prices.

All amounts are integers, so that sums are exact and a budget is held to the last FLOP and cent. Money is counted in
trillionths of the currency unit, which makes prices per million tokens exact to six decimals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from engine.protocol.types import InvalidRequest, ModelInfo
from reasoner.base_model import StrictModel
from reasoner.budget.spec import Budget
from reasoner.budget.usage import Usage

MONEY_UNITS = 10**12
"""Units of money in one currency unit."""
_FLOPS_PER_WEIGHT = 2

Price = Annotated[float, Field(ge=0, le=1e6)]


class Prices(StrictModel):
    """Prices of one model per million tokens, in the currency of ``Budget.cost``."""

    prompt: Price = Field(0.0, description="Prompt tokens that the model computes.")
    cached: Price = Field(0.0, description="Prompt tokens that it has in its cache.")
    generated: Price = Field(0.0, description="Tokens that it generates, as a policy or in critiques.")
    verifier: Price | None = Field(None, description="Tokens that it computes as a verifier; without it as prompt.")


@dataclass(frozen=True, slots=True)
class Amount:
    """Tokens as a token budget counts them, FLOPs, and trillionths of the currency unit."""

    tokens: int = 0
    flops: int = 0
    money: int = 0

    @classmethod
    def from_usage(cls, usage: Usage) -> Amount:
        """Return the amount that a usage counts against a budget."""
        return cls(usage.total, int(usage.flops), round(usage.cost * MONEY_UNITS))

    def __iter__(self) -> Iterator[int]:
        return iter((self.tokens, self.flops, self.money))

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.tokens + other.tokens, self.flops + other.flops, self.money + other.money)

    def __mul__(self, times: int) -> Amount:
        return Amount(self.tokens * times, self.flops * times, self.money * times)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.tokens - other.tokens, self.flops - other.flops, self.money - other.money)


NO_AMOUNT = Amount()


@dataclass(frozen=True, slots=True)
class TokenRate:
    """FLOPs and prices of one token of a model; prices in trillionths of the currency unit."""

    flops: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    verifier: int = 0

    @classmethod
    def of_model(cls, model: ModelInfo, prices: Mapping[str, Prices]) -> TokenRate:
        listed = prices.get(model.id, Prices())
        priced = {**listed.model_dump(), "verifier": listed.prompt if listed.verifier is None else listed.verifier}
        per_token = {name: round(price * (MONEY_UNITS // 10**6)) for name, price in priced.items()}
        return cls(flops=_FLOPS_PER_WEIGHT * model.parameters, **per_token)

    def max_branch_amount(self, prompt: int, tokens: int) -> Amount:
        """Return the largest amount that a branch can take, with its prompt cached or not, whichever costs more."""
        highest_price = max(self.prompt, self.cached)
        return Amount(tokens, self.flops * (prompt + tokens), highest_price * prompt + self.generated * tokens)

    def verification_amount(self, computed: int, generated: int = 0) -> Amount:
        """Return the amount of a verifier's computed tokens, of which some may be generated. Cached tokens are free."""
        money = self.verifier * (computed - generated) + self.generated * generated
        return Amount(computed, self.flops * computed, money)

    def max_verification_amount(self, computed: int, generated: int) -> Amount:
        """Return the largest amount of tokens of which at most ``generated`` are generated, cached or not."""
        money = self.verifier * (computed - generated) + max(self.generated, self.verifier) * generated
        return Amount(computed, self.flops * computed, money)

    def branch_usage(self, prompt: int, cached: int, generated: int, drafted: int, accepted: int) -> Usage:
        """Return the bill of a branch: two FLOPs per weight and computed token, rejected draft tokens included."""
        computed = prompt - cached + generated + drafted - accepted
        money = self.prompt * (prompt - cached) + self.cached * cached + self.generated * generated
        return Usage(
            prompt=prompt,
            cached=cached,
            generated=generated,
            drafted=drafted,
            accepted=accepted,
            flops=float(self.flops * computed),
            cost=money / MONEY_UNITS,
        )

    def verification_usage(self, computed: int, cached: int, generated: int = 0) -> Usage:
        """Return the bill of a verifier request."""
        amount = self.verification_amount(computed, generated)
        return Usage(
            verifier_computed=computed,
            verifier_cached=cached,
            verifier_generated=generated,
            flops=float(amount.flops),
            cost=amount.money / MONEY_UNITS,
        )


def check_budget(budget: Budget, model: str, info: ModelInfo | None, prices: Mapping[str, Prices]) -> None:
    """Raise ``InvalidRequest`` for a limit that cannot be enforced or does not pay for a single token.

    ``info`` is ``None`` if the model served as ``model`` is unknown.
    """
    if budget.flops is not None and info is not None:
        if info.parameters == 0:
            raise InvalidRequest(
                f"budget.flops: the engine does not report the size of model {model!r}: give tokens, seconds or cost",
                "budget.flops",
            )
        least = _FLOPS_PER_WEIGHT * info.parameters * 2  # at least one prompt token and one generated token
        if budget.flops < least:
            raise InvalidRequest(
                f"budget.flops: {budget.flops:g} is less than model {model!r} needs to read one token and write one: "
                f"give at least {least:g}",
                "budget.flops",
            )
    if budget.cost is not None:
        listed = prices.get(model, Prices())
        if not any(listed.model_dump().values()):
            priced = ", ".join(sorted(prices)) or "none"
            raise InvalidRequest(
                f"budget.cost: model {model!r} has no prices (models with prices: {priced}): write "
                f"[models.{model}.prices] with prompt, cached and generated, per million tokens, into reasoner.toml, "
                "or give tokens, seconds or flops",
                "budget.cost",
            )
        least_money = (listed.generated + min(listed.prompt, listed.cached)) / 1e6
        if budget.cost < least_money:
            raise InvalidRequest(
                f"budget.cost: {budget.cost:g} does not pay for one token of model {model!r}: "
                f"give at least {least_money:g}",
                "budget.cost",
            )
