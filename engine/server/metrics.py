"""The engine's numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.local_engine import LocalEngine

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
_SPECULATION_COUNTERS = {
    "drafted": ("drafted_tokens", "Draft tokens verified."),
    "accepted": ("accepted_tokens", "Draft tokens accepted, each of which saved a step."),
    "seconds": ("drafting_seconds", "Seconds spent on drafting."),
}
_SPECULATION_HISTOGRAMS = {
    "draft_sizes": ("draft_size", "Draft tokens verified per branch and step; 0 without a draft."),
    "accepted_lengths": ("accepted_length", "Draft tokens accepted per branch and step with a draft."),
}
_HISTOGRAMS = {
    "queue": ("queue_seconds", "From a request's arrival until one of its sequences first runs."),
    "first_token": ("time_to_first_token_seconds", "From a request's arrival until a branch's first token."),
    "per_token": ("time_per_output_token_seconds", "Mean time between a branch's tokens after its first."),
}


class EngineCollector(Collector):
    """Prometheus collector that reads the engine's counters at each scrape."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield one metric family per value, labelled by model."""
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
        yield from self._collect_speculation()
        yield from self._collect_timings()

    def _collect_speculation(self) -> Iterator[Metric]:
        all_stats, labels = self._engine.speculation_stats(), ["model", "drafter"]
        for name, (unit, text) in _SPECULATION_COUNTERS.items():
            counter = CounterMetricFamily(f"reasoner_engine_{unit}", text, labels=labels)
            for model, stats in all_stats.items():
                counter.add_metric([model, stats.drafter], getattr(stats, name))
            yield counter
        for name, (unit, text) in _SPECULATION_HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"reasoner_engine_{unit}", text, labels=labels)
            for model, stats in all_stats.items():
                counted = getattr(stats, name)
                histogram.add_metric([model, stats.drafter], counted.cumulative(), counted.total)
            yield histogram

    def _collect_timings(self) -> Iterator[Metric]:
        timings = self._engine.timings()
        for name, (unit, text) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"reasoner_engine_{unit}", text, labels=["model"])
            for model, times in timings.items():
                counted = getattr(times, name)
                histogram.add_metric([model], counted.cumulative(), counted.total)
            yield histogram
        finished = CounterMetricFamily("reasoner_engine_finished", "Branches that ended.", labels=["model", "reason"])
        requests = CounterMetricFamily("reasoner_engine_requests", "Requests taken.", labels=["model", "kind"])
        for model, times in timings.items():
            for reason, count in dict(times.finished).items():
                finished.add_metric([model, reason], count)
            for kind, count in dict(times.requests).items():
                requests.add_metric([model, kind], count)
        yield finished
        yield requests
