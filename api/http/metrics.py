"""Prometheus metrics. Those of jobs are read from the store at each scrape and are the same in every API process;
those of HTTP belong to this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.remote.health import ReplicaHealth
from reasoner.jobs.job import FinishReason
from workers.archive.filters import DEAD

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
     get_args(FinishReason)),
)  # fmt: skip
"""Name, text, label, prefix of the store's counters, and values of the label."""


def render_metrics(
    counts: dict[str, int],
    counters: dict[str, float],
    *,
    engines: Sequence[ReplicaHealth],
    queues: Mapping[str, Mapping[str, int]],
    queue_cap: int,
    memory: tuple[int, int] | None,
    archive_up: bool | None,
) -> bytes:
    """Return the text of ``/metrics`` from ``get_stats``, ``get_queues`` and ``get_memory`` of the job store.

    ``engines``: the health of those that this process knows. ``memory``: ``None`` if it is not known. ``archive_up``:
    ``None`` without an archive.
    """
    metrics = (
        *_job_metrics(counts, counters),
        GaugeMetricFamily("reasoner_queue_cap", "Waiting jobs beyond which more are refused.", value=queue_cap),
        *_queue_metrics(queues),
        *_broker_metrics(memory),
        *_archive_metrics(archive_up),
        *_engine_metrics(counters, engines),
    )
    registry = CollectorRegistry()
    registry.register(_FixedCollector(metrics))
    return generate_latest(REGISTRY) + generate_latest(registry)


def _job_metrics(counts: dict[str, int], counters: dict[str, float]) -> Iterator[Metric]:
    def counter(name: str) -> float:
        return counters.get(name, 0.0)

    by_status = GaugeMetricFamily("reasoner_jobs", "Jobs in the broker's memory.", labels=["status"])
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

    yield CounterMetricFamily("reasoner_jobs_archived", "Jobs moved to the archive.", value=counter("archived"))
    yield CounterMetricFamily("reasoner_work_seconds", "Working time of all jobs.", value=counter("usage:seconds"))
    yield CounterMetricFamily(
        "reasoner_lease_reclaims", "Jobs taken over from a worker whose lease expired.", value=counter("lease_reclaims")
    )

    for name, text in (("job", "From submission to end."), ("queue_wait", "From submission to the first worker.")):
        histogram = HistogramMetricFamily(f"reasoner_{name}_seconds", text)
        edges = [*((edge, counter(f"{name}:{edge}")) for edge in BUCKETS), ("+Inf", counter(f"{name}:count"))]
        histogram.add_metric([], edges, counter(f"{name}:sum"))
        yield histogram


def _queue_metrics(queues: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    text = "Jobs of a queue that could start now, and those that run."
    family = GaugeMetricFamily("reasoner_queue_jobs", text, labels=["queue", "state"])
    for queue, counts in queues.items():
        for state, count in counts.items():
            family.add_metric([queue, state], count)
    yield family


def _broker_metrics(memory: tuple[int, int] | None) -> Iterator[Metric]:
    if memory is not None:
        used, limit = memory
        yield GaugeMetricFamily("reasoner_broker_memory_bytes", "Memory that Redis uses.", value=used)
        yield GaugeMetricFamily("reasoner_broker_memory_limit_bytes", "Its maxmemory; 0 for none.", value=limit)


def _archive_metrics(is_up: bool | None) -> Iterator[Metric]:
    if is_up is not None:
        text = "1 if the archive of ended jobs can be used by this process, else 0."
        yield GaugeMetricFamily("reasoner_archive_up", text, value=is_up)


def _engine_metrics(counters: dict[str, float], engines: Sequence[ReplicaHealth]) -> Iterator[Metric]:
    up = GaugeMetricFamily("reasoner_engine_up", "1 if the engine answers this process, else 0.", labels=["engine"])
    for engine in engines:
        up.add_metric([engine.name], engine.state == "up")
    yield up
    for kind, text in (("requests", "Requests the engine answered."), ("failures", "Requests the engine failed.")):
        family = CounterMetricFamily(f"reasoner_engine_{kind}", f"{text} Counted as jobs end.", labels=["engine"])
        prefix = f"engine:{kind}:"
        counted = {name.removeprefix(prefix): count for name, count in counters.items() if name.startswith(prefix)}
        # Also zeros: the increase of a counter that begins with its first failure does not have it.
        for name, count in (dict.fromkeys((engine.name for engine in engines), 0.0) | counted).items():
            family.add_metric([name], count)
        yield family


class _FixedCollector(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics
