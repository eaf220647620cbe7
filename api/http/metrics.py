"""Prometheus metrics. What is about jobs is read from the store at each scrape and is the same in every API process;
what is about HTTP is this process's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.client.health import Standing
from workers.store.jobs import DEAD

HTTP_REQUESTS = Counter("reasoner_http_requests", "HTTP requests.", ["method", "route", "status"])
HTTP_SECONDS = Histogram("reasoner_http_request_seconds", "Time to the end of the answer.", ["method", "route"])
HTTP_STREAMS = Gauge("reasoner_open_streams", "Event streams that clients read now.")

BUCKETS = ("0.5", "1", "2", "5", "10", "30", "60", "120", "300", "600", "1800")
"""As in ``workers/store/lua/common.lua``, which counts them."""

TOKEN_KINDS = (
    "prompt",
    "cached",
    "generated",
    "drafted",
    "accepted",
    "verifier_computed",
    "verifier_cached",
    "pruned",
)


def exposition(counts: dict[str, int], counters: dict[str, float], engines: Sequence[Standing]) -> bytes:
    """The text of ``/metrics`` from ``JobStore.stats`` and from what this process knows of the engines."""
    read = CollectorRegistry()
    read.register(_Fixed((*_job_metrics(counts, counters), *_engine_metrics(counters, engines))))
    return generate_latest(REGISTRY) + generate_latest(read)


def _job_metrics(counts: dict[str, int], counters: dict[str, float]) -> Iterator[Metric]:
    def counter(name: str) -> float:
        return counters.get(name, 0.0)

    by_status = GaugeMetricFamily("reasoner_jobs", "Jobs in the store.", labels=["status"])
    for status, count in counts.items():
        if status != DEAD:  # they are among the failed ones
            by_status.add_metric([status], count)
    yield by_status
    yield GaugeMetricFamily(
        "reasoner_dead_jobs", "Failed jobs in the store that lost their worker too often.", value=counts[DEAD]
    )

    finished = CounterMetricFamily(
        "reasoner_jobs_finished", "Jobs that ended, deleted ones included.", labels=["status"]
    )
    for status in ("completed", "incomplete", "failed", "cancelled"):
        finished.add_metric([status], counter(f"finished:{status}"))
    yield finished

    tokens = CounterMetricFamily("reasoner_tokens", "Tokens on the bills of all jobs.", labels=["kind"])
    for kind in TOKEN_KINDS:
        tokens.add_metric([kind], counter(f"usage:{kind}"))
    yield tokens

    yield CounterMetricFamily("reasoner_work_seconds", "Working time of all jobs.", value=counter("usage:seconds"))
    yield CounterMetricFamily(
        "reasoner_lease_reclaims", "Jobs taken over from a worker that fell silent.", value=counter("lease_reclaims")
    )

    webhooks = CounterMetricFamily("reasoner_webhooks", "Attempts at telling the end of a job.", labels=["outcome"])
    for outcome in ("delivered", "pending", "failed"):
        webhooks.add_metric([outcome], counter(f"webhooks:{outcome}"))
    yield webhooks

    reasons = CounterMetricFamily("reasoner_results", "Why searches ended that have a result.", labels=["reason"])
    for reason in ("answer", "budget", "no_answer", "cancelled"):
        reasons.add_metric([reason], counter(f"reason:{reason}"))
    yield reasons

    for name, about in (("job", "From submission to end."), ("queue_wait", "From submission to the first worker.")):
        took = HistogramMetricFamily(f"reasoner_{name}_seconds", about)
        edges = [*((edge, counter(f"{name}:{edge}")) for edge in BUCKETS), ("+Inf", counter(f"{name}:count"))]
        took.add_metric([], edges, counter(f"{name}:sum"))
        yield took


def _engine_metrics(counters: dict[str, float], engines: Sequence[Standing]) -> Iterator[Metric]:
    up = GaugeMetricFamily("reasoner_engine_up", "Whether this process hears from the engine.", labels=["engine"])
    for known in engines:
        up.add_metric([known.name], known.state == "up")
    yield up
    for what, meaning in (("requests", "Requests that it answered."), ("failures", "Requests that it failed.")):
        family = CounterMetricFamily(f"reasoner_engine_{what}", f"{meaning} Counted as jobs end.", labels=["engine"])
        for name, count in counters.items():
            if name.startswith(f"engine:{what}:"):
                family.add_metric([name.removeprefix(f"engine:{what}:")], count)
        yield family


class _Fixed(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics
