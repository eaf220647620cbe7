"""Prometheus metrics. Those of jobs are read from the store at each scrape and are the same in every API process;
those of HTTP belong to this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.remote.health import ReplicaHealth
from workers.store.reaping import DEAD

HTTP_REQUESTS = Counter("reasoner_http_requests", "HTTP requests.", ["method", "route", "status"])
HTTP_SECONDS = Histogram("reasoner_http_request_seconds", "Time to the end of the response.", ["method", "route"])
HTTP_STREAMS = Gauge("reasoner_open_streams", "Event streams that are open now.")

BUCKETS = ("0.5", "1", "2", "5", "10", "30", "60", "120", "300", "600", "1800")
"""Upper bounds in seconds, as in ``workers/store/lua/common.lua``, which counts them."""

_LABELLED_COUNTERS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    ("reasoner_jobs_finished", "Jobs that ended, deleted ones included.", "status", "finished",
     ("completed", "incomplete", "failed", "cancelled")),
    ("reasoner_tokens", "Tokens billed to all jobs.", "kind", "usage",
     ("prompt", "cached", "generated", "drafted", "accepted", "verifier_computed", "verifier_cached", "pruned",
      "dropped")),
    ("reasoner_webhooks", "Attempts to deliver a webhook.", "outcome", "webhooks", ("delivered", "pending", "failed")),
    ("reasoner_results", "Searches with a result, by why they ended.", "reason", "reason",
     ("answer", "budget", "no_answer", "cancelled")),
)  # fmt: skip
"""Name, text, label, prefix of the store's counters, and values of the label."""


def render_metrics(counts: dict[str, int], counters: dict[str, float], engines: Sequence[ReplicaHealth]) -> bytes:
    """Return the text of ``/metrics`` from ``JobStore.stats`` and the health of the engines."""
    registry = CollectorRegistry()
    registry.register(_FixedCollector((*_job_metrics(counts, counters), *_engine_metrics(counters, engines))))
    return generate_latest(REGISTRY) + generate_latest(registry)


def _job_metrics(counts: dict[str, int], counters: dict[str, float]) -> Iterator[Metric]:
    def counter(name: str) -> float:
        return counters.get(name, 0.0)

    by_status = GaugeMetricFamily("reasoner_jobs", "Jobs in the store.", labels=["status"])
    for status, count in counts.items():
        if status != DEAD:  # dead jobs are counted as failed too
            by_status.add_metric([status], count)
    yield by_status
    yield GaugeMetricFamily(
        "reasoner_dead_jobs", "Failed jobs in the store that lost their worker too often.", value=counts[DEAD]
    )

    for metric, text, label, prefix, values in _LABELLED_COUNTERS:
        family = CounterMetricFamily(metric, text, labels=[label])
        for value in values:
            family.add_metric([value], counter(f"{prefix}:{value}"))
        yield family

    yield CounterMetricFamily("reasoner_work_seconds", "Working time of all jobs.", value=counter("usage:seconds"))
    yield CounterMetricFamily(
        "reasoner_lease_reclaims", "Jobs taken over from a worker whose lease expired.", value=counter("lease_reclaims")
    )

    for name, text in (("job", "From submission to end."), ("queue_wait", "From submission to the first worker.")):
        histogram = HistogramMetricFamily(f"reasoner_{name}_seconds", text)
        edges = [*((edge, counter(f"{name}:{edge}")) for edge in BUCKETS), ("+Inf", counter(f"{name}:count"))]
        histogram.add_metric([], edges, counter(f"{name}:sum"))
        yield histogram


def _engine_metrics(counters: dict[str, float], engines: Sequence[ReplicaHealth]) -> Iterator[Metric]:
    up = GaugeMetricFamily("reasoner_engine_up", "1 if the engine answers this process, else 0.", labels=["engine"])
    for engine in engines:
        up.add_metric([engine.name], engine.state == "up")
    yield up
    for kind, text in (("requests", "Requests the engine answered."), ("failures", "Requests the engine failed.")):
        family = CounterMetricFamily(f"reasoner_engine_{kind}", f"{text} Counted as jobs end.", labels=["engine"])
        for name, count in counters.items():
            if name.startswith(f"engine:{kind}:"):
                family.add_metric([name.removeprefix(f"engine:{kind}:")], count)
        yield family


class _FixedCollector(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics
