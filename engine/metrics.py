"""The engine's numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.local import LocalEngine

_GAUGES = {
    "running": "Sequences that run.",
    "waiting": "Sequences that wait for memory or a place.",
    "kv_tokens": "Slots of the key-value pool in use, cached prefixes included.",
    "kv_capacity": "Slots of the key-value pool.",
    "pinned_tokens": "Slots of the key-value pool that leases pin.",
    "leases": "Leases that pin anything.",
}
_COUNTERS = {
    "prompt_tokens": "Tokens of admitted sequences.",
    "cached_tokens": "Those of them that the prefix cache had.",
    "generated_tokens": "Tokens sampled.",
    "scored_tokens": "Tokens forwarded for score requests.",
    "preemptions": "Sequences that lost their pages and started again.",
}


class EngineCollector(Collector):
    """Reads the engine when it is scraped; nothing is counted twice."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """One family per number, labelled by model."""
        stats = self._engine.stats()
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"reasoner_engine_{name}", text, labels=["model"])
            for model, numbers in stats.items():
                gauge.add_metric([model], getattr(numbers, name))
            yield gauge
        hits = GaugeMetricFamily("reasoner_engine_hit_rate", "Cached share of prompt tokens.", labels=["model"])
        for model, numbers in stats.items():
            hits.add_metric([model], numbers.cached_tokens / max(numbers.prompt_tokens, 1))
        yield hits
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"reasoner_engine_{name}", text, labels=["model"])
            for model, numbers in stats.items():
                counter.add_metric([model], getattr(numbers, name))
            yield counter
