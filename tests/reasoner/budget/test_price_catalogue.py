"""List prices of hosted models: bills equal the catalogue's own, and unknown models are named."""

from __future__ import annotations

from decimal import Decimal

import pytest
from genai_prices import Usage, calc_price
from genai_prices.data_snapshot import get_snapshot
from genai_prices.types import TieredPrices

from reasoner.budget.price_catalogue import NotInCatalogue, find_prices
from reasoner.budget.prices import Prices


def bill(prices: Prices, prompt: int, cached: int, generated: int) -> float:
    return (prices.prompt * (prompt - cached) + prices.cached * cached + prices.generated * generated) / 1e6


@pytest.mark.parametrize(
    ("provider", "model"),
    [("openai", "gpt-4o-mini"), ("openai", "gpt-4o-mini-2024-07-18"), ("anthropic", "claude-sonnet-4-5")],
)
def test_a_bill_is_that_of_the_catalogue(provider: str, model: str) -> None:
    usage = Usage(input_tokens=9_000, cache_read_tokens=4_000, output_tokens=700)
    expected = calc_price(usage, model, provider_id=provider).total_price
    assert bill(find_prices(provider, model), 9_000, 4_000, 700) >= float(expected) * (1 - 1e-12)
    if provider == "openai":  # one rate for all lengths
        assert bill(find_prices(provider, model), 9_000, 4_000, 700) == pytest.approx(float(expected))


def test_no_bill_is_below_that_of_the_catalogue_however_long_the_prompt_is() -> None:
    tiered = [
        (provider, model)
        for provider in get_snapshot().providers
        for model in provider.models
        if not isinstance(model.prices, list)
        and isinstance(getattr(model.prices, "input_mtok", None), TieredPrices)
        and getattr(model.prices, "output_mtok", None) is not None
    ]
    assert len(tiered) > 5
    for provider, model in tiered:
        for prompt in (1_000, 300_000):
            usage = Usage(input_tokens=prompt, output_tokens=500)
            expected: Decimal = model.calc_price(usage, provider).total_price
            assert bill(find_prices(provider.id, model.id), prompt, 0, 500) >= float(expected) * (1 - 1e-12)


def test_what_is_not_in_the_catalogue_is_named_with_what_is_similar() -> None:
    with pytest.raises(NotInCatalogue, match=r"no provider 'opnai'; similar are .*openai"):
        find_prices("opnai", "gpt-4o-mini")
    with pytest.raises(NotInCatalogue, match=r"no model 'gtp-40-mini' of openai; similar are .*gpt-4o-mini"):
        find_prices("openai", "gtp-40-mini")
