"""List prices of hosted models: bills equal the catalogue's own, and unknown models are named."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta

import pytest
from genai_prices import Usage, calc_price
from genai_prices.data_snapshot import get_snapshot
from genai_prices.types import ModelInfo, StartDateConstraint

from reasoner.budget.price_catalogue import NotInCatalogue, find_prices
from reasoner.budget.prices import Prices
from tests.long import mostly_long


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


def times_from_now_on(model: ModelInfo) -> list[datetime]:
    """Return times of each of the model's prices: the hours of a day, now and after each announced start."""
    starts = {datetime.now(tz=UTC)}
    for each in model.prices if isinstance(model.prices, list) else ():
        if isinstance(each.constraint, StartDateConstraint):
            starts.add(max(datetime.now(tz=UTC), datetime.combine(each.constraint.start_date, time(tzinfo=UTC))))
    if len(starts) == 1 and not isinstance(model.prices, list):
        return list(starts)
    return [start + timedelta(minutes=30 * half) for start in starts for half in range(48)]


USAGES = [
    {"input_tokens": 9_000, "output_tokens": 700},
    {"input_tokens": 9_000, "cache_read_tokens": 4_000, "output_tokens": 700},
    {"input_tokens": 900_000, "cache_read_tokens": 4_000, "output_tokens": 700, "output_reasoning_tokens": 600},
    {"input_tokens": 300_000, "cache_write_tokens": 300_000, "output_tokens": 500},
]


@pytest.mark.parametrize("part", mostly_long(range(5), every=5))
def test_no_bill_is_below_that_of_the_catalogue_for_any_model_prompt_cache_or_time_from_now_on(part: int) -> None:
    compared = 0
    for provider in get_snapshot().providers:
        for model in provider.models[part::5]:
            try:
                prices = find_prices(provider.id, model.id)
            except NotInCatalogue:
                continue
            assert prices.verifier == max(prices.prompt, prices.generated)
            for usage in USAGES:
                prompt, cached, generated = (
                    usage.get(name, 0) for name in ("input_tokens", "cache_read_tokens", "output_tokens")
                )
                billed = bill(prices, prompt, cached, generated)
                for moment in times_from_now_on(model):
                    expected = model.calc_price(Usage(**usage), provider, genai_request_timestamp=moment).total_price
                    assert billed >= float(expected) * (1 - 1e-12), (provider.id, model.id, usage, moment)
                    compared += 1
    assert compared > 200


@pytest.mark.parametrize(
    ("provider", "model", "unit"),
    [
        ("perplexity", "sonar", "requests_kcount"),
        ("perplexity", "sonar-deep-research", "output_citation_mtok"),
        ("openai", "tts-1", "no price by tokens"),
    ],
)
def test_a_model_that_costs_more_than_its_tokens_is_refused(provider: str, model: str, unit: str) -> None:
    with pytest.raises(NotInCatalogue, match=unit):
        find_prices(provider, model)


def test_what_is_not_in_the_catalogue_is_named_with_what_is_similar() -> None:
    with pytest.raises(NotInCatalogue, match=r"no provider 'opnai'; similar are .*openai"):
        find_prices("opnai", "gpt-4o-mini")
    with pytest.raises(NotInCatalogue, match=r"no model 'gtp-40-mini' of openai; similar are .*gpt-4o-mini"):
        find_prices("openai", "gtp-40-mini")
