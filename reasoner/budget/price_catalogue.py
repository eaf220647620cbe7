"""Prices of hosted models, from the catalogue of the package ``genai-prices``, which is part of its release.

Nothing is fetched: prices change with the installed version. Its currency is the US dollar. What a bill here cannot
tell apart is charged at the dearest rate: that of the longest prompts, and of the dearest hours of a day.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING

from reasoner.budget.prices import Prices

if TYPE_CHECKING:  # the catalogue takes a tenth of a second to import, and most services need none
    from genai_prices.types import ModelInfo, ModelPrice, TieredPrices


class NotInCatalogue(ValueError):
    """The catalogue has no such provider, no such model, or no price for it."""


@lru_cache(maxsize=256)
def find_prices(provider: str, model: str) -> Prices:
    """Return the prices of a provider's model. Raises ``NotInCatalogue``, naming what is similar."""
    from genai_prices.data_snapshot import get_snapshot

    snapshot = get_snapshot()
    known = {one.id: one for one in snapshot.providers}
    if provider not in known:
        raise NotInCatalogue(f"the price catalogue has no provider {provider!r}{_similar(provider, known)}")
    models = {one.id: one for one in known[provider].models}
    found = models.get(model) or known[provider].find_model(model.lower(), all_providers=snapshot.providers)
    if found is None:
        raise NotInCatalogue(f"the price catalogue has no model {model!r} of {provider}{_similar(model, models)}")
    current = _current_prices(found)
    prompt, generated = (_dearest(current, name) for name in ("input_mtok", "output_mtok"))
    if prompt is None or generated is None:
        raise NotInCatalogue(f"the price catalogue has no price by tokens for {model!r} of {provider}")
    cached = _dearest(current, "cache_read_mtok")
    return Prices(prompt=float(prompt), cached=float(prompt if cached is None else cached), generated=float(generated))


def _current_prices(model: ModelInfo) -> list[ModelPrice]:
    """Return the prices of today, of all its hours."""
    from genai_prices.types import TimeOfDateConstraint

    if isinstance(model.prices, list) and any(isinstance(one.constraint, TimeOfDateConstraint) for one in model.prices):
        return [one.prices for one in model.prices]
    return [model.get_prices(datetime.now(tz=UTC))]


def _dearest(prices: Iterable[ModelPrice], name: str) -> Decimal | None:
    rates: list[Decimal] = []
    for each in prices:
        rate: Decimal | TieredPrices | None = getattr(each, name, None)
        if isinstance(rate, Decimal):
            rates.append(rate)
        elif rate is not None:
            rates += [rate.base, *(tier.price for tier in rate.tiers)]
    return max(rates, default=None)


def _similar(name: str, names: Iterable[str]) -> str:
    similar = difflib.get_close_matches(name, list(names), n=5, cutoff=0.4)
    return f"; similar are {', '.join(similar)}" if similar else ""
