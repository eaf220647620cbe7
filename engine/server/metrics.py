"""The engine's numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.local_engine import LocalEngine

_Table = Mapping[str, tuple[str, str]]
"""Name and help of a metric by the attribute that it reports."""
_Sources = Sequence[tuple[list[str], object]]
"""Values of the labels, and the object with these attributes."""

_GAUGES = {
    "running": ("running", "Sequences that run."),
    "waiting": ("waiting", "Sequences that wait for memory or a place."),
    "kv_tokens": ("kv_tokens", "Slots of the key-value pool in use, cached prefixes included."),
    "kv_capacity": ("kv_capacity", "Slots of the key-value pool."),
    "state_slots": ("state_slots", "Slots of recurrent states in use, those of cached prefixes included."),
    "state_capacity": ("state_capacity", "Slots of recurrent states; 0 for a model without such layers."),
    "pinned_tokens": ("pinned_tokens", "Slots of the key-value pool that leases pin."),
    "pins": ("leases", "Leases that pin anything."),
    "hit_rate": ("hit_rate", "Cached share of prompt tokens."),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of admitted sequences."),
    "cached_tokens": ("cached_tokens", "Those of them that the prefix cache had."),
    "generated_tokens": ("generated_tokens", "Tokens sampled."),
    "scored_tokens": ("scored_tokens", "Tokens forwarded for score requests."),
    "dropped_tokens": (
        "dropped_tokens",
        "Tokens of thoughts whose keys a kv_budget dropped, again after a preemption.",
    ),
    "preemptions": ("preemptions", "Sequences that lost their pages and started again."),
}
_OFFLOADING_GAUGES = {
    "host_bytes": ("offload_host_bytes", "Bytes of evicted prefixes in host memory."),
    "disk_bytes": ("offload_disk_bytes", "Bytes of evicted prefixes on disk."),
}
_OFFLOADING_COUNTERS = {
    "pages_written": ("offload_pages_written", "Evicted pages and states that the lower tier took."),
    "pages_loaded": ("offload_pages_loaded", "Pages and states that came back from it."),
    "pages_dropped": (
        "offload_pages_dropped",
        "Pages and states that it had no room for, or that newer ones replaced.",
    ),
    "pages_lost": ("offload_pages_lost", "Pages and states whose file was missing or damaged."),
    "bytes_written": ("offload_bytes_written", "Bytes that the lower tier took."),
    "bytes_loaded": ("offload_bytes_loaded", "Bytes that came back from it."),
    "write_seconds": ("offload_write_seconds", "Seconds spent on writing files."),
    "load_seconds": ("offload_load_seconds", "Seconds spent on reading files and on copies into the cache."),
    "write_failures": ("offload_write_failures", "Files that could not be written; nothing is after the first."),
    "loads_skipped": ("offload_loads_skipped", "Prefixes computed although they were there, as loading takes longer."),
    "tokens_loaded": ("offload_tokens_loaded", "Tokens that came back instead of being computed."),
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
        stats = [([model], numbers) for model, numbers in self._engine.stats().items()]
        yield from _iterate_families(GaugeMetricFamily, _GAUGES, stats)
        yield from _iterate_families(CounterMetricFamily, _COUNTERS, stats)
        tiers = [([model], one.offloading) for model, one in self._engine.stats().items() if one.offloading is not None]
        yield from _iterate_families(GaugeMetricFamily, _OFFLOADING_GAUGES, tiers)
        yield from _iterate_families(CounterMetricFamily, _OFFLOADING_COUNTERS, tiers)
        drafting = [([model, numbers.drafter], numbers) for model, numbers in self._engine.speculation_stats().items()]
        yield from _iterate_families(CounterMetricFamily, _SPECULATION_COUNTERS, drafting, "drafter")
        yield from _iterate_families(HistogramMetricFamily, _SPECULATION_HISTOGRAMS, drafting, "drafter")
        timings = self._engine.timings()
        yield from _iterate_families(
            HistogramMetricFamily, _HISTOGRAMS, [([model], times) for model, times in timings.items()]
        )
        finished = CounterMetricFamily("reasoner_engine_finished", "Branches that ended.", labels=["model", "reason"])
        requests = CounterMetricFamily("reasoner_engine_requests", "Requests taken.", labels=["model", "kind"])
        for model, times in timings.items():
            for reason, count in dict(times.finished).items():
                finished.add_metric([model, reason], count)
            for kind, count in dict(times.requests).items():
                requests.add_metric([model, kind], count)
        yield finished
        yield requests


def _iterate_families(
    family_type: type[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily],
    table: _Table,
    sources: _Sources,
    *labels: str,
) -> Iterator[Metric]:
    for attribute, (name, text) in table.items():
        family = family_type(f"reasoner_engine_{name}", text, labels=["model", *labels])
        for label_values, source in sources:
            value = getattr(source, attribute)
            if isinstance(family, HistogramMetricFamily):
                family.add_metric(label_values, value.cumulative(), value.total)
            else:
                family.add_metric(label_values, value)
        yield family
