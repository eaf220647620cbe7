"""Prices of hosted models, from the catalogue of the package ``genai-prices``, which is part of its release.

Nothing is fetched: prices change with the installed version. Its currency is the US dollar. What a bill here cannot
tell apart is charged at the dearest rate: that of the longest prompts, of the dearest hours of a day, of prices that
are announced, and of prompts that are written to a cache. A price that no number of tokens covers is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING

from reasoner.budget.prices import Prices

if TYPE_CHECKING:  # the catalogue takes a tenth of a second to import, and most services need none
    from genai_prices.types import ModelInfo, ModelPrice


_PROMPT = ("input_mtok", "cache_write_mtok", "cache_write_5m_mtok")
_GENERATED = ("output_mtok", "output_reasoning_mtok")
_CACHED = ("cache_read_mtok",)
_UNREQUESTED = {"cache_write_1h_mtok", "web_searches_kcount", "storage_searches_kcount"}
"""Prices of what a provider does only where a request asks for it, as none of ours does."""
_OTHER_MEDIA = ("audio", "image", "video", "document")
_SMALLEST_PRICE = Decimal("1e-6")


class NotInCatalogue(ValueError):
    """The catalogue has no such provider, no such model, or no price for it."""


@lru_cache(maxsize=256)
def find_prices(provider: str, model: str) -> Prices:
    """Return the prices of a provider's model. Raises ``NotInCatalogue``, naming what is similar."""
    from genai_prices.data_snapshot import get_snapshot

    snapshot = get_snapshot()
    known = {one.id: one for one in snapshot.providers}
    if provider not in known:
        raise NotInCatalogue(f"the price catalogue has no provider {provider!r}{_describe_similar(provider, known)}")
    models = {one.id: one for one in known[provider].models}
    found = models.get(model) or known[provider].find_model(model.lower(), all_providers=snapshot.providers)
    if found is None:
        raise NotInCatalogue(
            f"the price catalogue has no model {model!r} of {provider}{_describe_similar(model, models)}"
        )
    current = _prices_from_now_on(found)
    for price in current:
        _check_prices(price, provider, model)
    prompt, generated = _find_highest_rate(current, _PROMPT), _find_highest_rate(current, _GENERATED)
    cached = max(
        _find_highest_rate([price], _CACHED if price.cache_read_mtok is not None else ("input_mtok",))
        for price in current
    )
    return Prices(
        prompt=float(prompt),
        cached=float(cached),
        generated=float(generated),
        verifier=float(max(prompt, generated)),  # the bill does not tell a judge's prompt from what it writes
    )


@lru_cache(maxsize=64)
def describe_source(provider: str) -> str:
    """Return where the prices of a provider's models come from."""
    return f"{provider} in genai-prices {version('genai-prices')}"


def _prices_from_now_on(model: ModelInfo) -> list[ModelPrice]:
    """Return the prices of today, of all its hours, and those announced: a process may run until they hold."""
    from genai_prices.types import ModelPrice, StartDateConstraint

    if isinstance(model.prices, ModelPrice):
        return [model.prices]
    now = datetime.now(tz=UTC)
    prices = []
    for each in reversed(model.prices):  # the last one that holds takes precedence
        prices.append(each.prices)
        since = each.constraint
        if since is None or (isinstance(since, StartDateConstraint) and since.active(now)):
            break
    return prices


def _check_prices(price: ModelPrice, provider: str, model: str) -> None:
    """Raise ``NotInCatalogue`` for a price that is not one of prompts and generated text alone."""
    priced = {name for name, value in vars(price).items() if value is not None}
    if not {"input_mtok", "output_mtok"} <= priced:
        raise NotInCatalogue(f"the price catalogue has no price by tokens for {model!r} of {provider}")
    others = sorted(
        name
        for name in priced - {*_PROMPT, *_GENERATED, *_CACHED, *_UNREQUESTED}
        if not any(medium in name for medium in _OTHER_MEDIA)
    )
    if others:
        raise NotInCatalogue(f"{model!r} of {provider} costs more than its tokens ({', '.join(others)})")


def _find_highest_rate(prices: Iterable[ModelPrice], names: Iterable[str]) -> Decimal:
    """Return the highest rate under any of the names, rounded up to what a price can tell; 0 without any."""
    rates = [Decimal(0)]
    for rate in (getattr(each, name, None) for each in prices for name in names):
        if isinstance(rate, Decimal):
            rates.append(rate)
        elif rate is not None:
            rates += [rate.base, *(tier.price for tier in rate.tiers)]
    return max(rates).quantize(_SMALLEST_PRICE, rounding=ROUND_CEILING)


def _describe_similar(name: str, names: Iterable[str]) -> str:
    similar = difflib.get_close_matches(name, list(names), n=5, cutoff=0.4)
    return f"; similar are {', '.join(similar)}" if similar else ""
