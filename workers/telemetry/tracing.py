"""OpenTelemetry traces of requests, of the jobs that they submit, and of the jobs' engine calls.

Disabled, and OpenTelemetry is not imported, until ``start_tracing`` finds a configured collector. A job continues the
trace of its request in any process, through its ``Origin``. No span contains a problem or an answer.

Engine calls are named after the GenAI semantic conventions, which are still in development: all names are in this
module.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from engine.protocol.dispatching import ForwardingEngine
from engine.protocol.types import Completion, EngineClient, Events, GenerateRequest, ScoreRequest, ScoreResult
from engine.remote.connection import TRACEPARENT
from engine.remote.proxies import find_proxy_url
from workers.config.settings import Settings
from workers.config.types import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

Attribute = str | int | float | bool
Kind = Literal["server", "consumer", "client"]

REQUEST_ID, JOB_ID, ATTEMPT, STRATEGY, STATUS = (
    "reasoner.request_id",
    "reasoner.job.id",
    "reasoner.job.attempt",
    "reasoner.job.strategy",
    "reasoner.job.status",
)
METHOD, ROUTE, HTTP_STATUS = "http.request.method", "http.route", "http.response.status_code"
_OPERATION, _MODEL = "gen_ai.operation.name", "gen_ai.request.model"
_INPUT, _OUTPUT, _CACHED = (
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "gen_ai.usage.cache_read.input_tokens",
)
_BRANCHES = "reasoner.branches"
_ERROR = "error.type"

_FLUSH_SECONDS = 2.0

_tracer: Tracer | None = None
_flush: Callable[[], object] | None = None


def start_tracing(settings: Settings, role: str) -> None:
    """Export this process's spans to the configured collector, if there is one, in batches from a background thread.

    Remaining spans are exported at exit. The SDK's ``OTEL_*`` variables (sampling, headers, …) apply. Raises
    ``ConfigError`` if the extra ``reasoner[otel]`` is not installed.
    """
    if settings.otlp_url is None:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        raise ConfigError("otlp_url: traces need more packages: pip install 'reasoner[otel]'") from None
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: f"reasoner-{role}"}))
    exporter = OTLPSpanExporter(
        endpoint=f"{settings.otlp_url.rstrip('/')}/v1/traces", session=_make_session(settings.otlp_url)
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace_with(provider)
    global _flush
    _flush = provider.force_flush


def _make_session(url: str) -> Any:
    """Return the session of the exporter, with the proxy that all of our requests to the address would use."""
    import requests

    session = requests.Session()
    session.trust_env = False
    if (proxy := find_proxy_url(url)) is not None:
        session.proxies = {"http": proxy, "https": proxy}
    return session


def flush_traces() -> None:
    """Export the remaining spans now, for a process ended by a signal. Does not wait for a collector that is away."""
    if _flush is not None:
        sending = threading.Thread(target=_flush, daemon=True)
        sending.start()
        sending.join(_FLUSH_SECONDS)


def trace_with(provider: TracerProvider | None) -> None:
    """Set the provider of all further spans; ``None`` disables tracing."""
    global _tracer
    _tracer = None if provider is None else provider.get_tracer("reasoner")


@contextlib.contextmanager
def span(name: str, kind: Kind, attributes: Mapping[str, Attribute], parent: str = "") -> Iterator[None]:
    """Run the block in a span of this name, below ``parent`` (a ``traceparent``) or else the current one.

    Requests to engines carry its ``traceparent``.
    """
    if _tracer is None:
        yield
        return
    from opentelemetry.trace import use_span

    begun = _begin(_tracer, name, kind=kind, attributes=attributes, parent=parent)
    with _end_span(begun), use_span(begun, record_exception=False, set_status_on_exception=False):
        token = TRACEPARENT.set(traceparent())
        try:
            yield
        finally:
            TRACEPARENT.reset(token)


def describe(attributes: Mapping[str, Attribute], name: str | None = None) -> None:
    """Add attributes that were unknown at its start to the current span, and rename it if ``name`` is given."""
    if _tracer is None:
        return
    from opentelemetry.trace import get_current_span

    get_current_span().set_attributes(attributes)
    if name is not None:
        get_current_span().update_name(name)


def traceparent() -> str:
    """Return the ``traceparent`` of the current span; empty without one."""
    if _tracer is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def traced(engine: EngineClient) -> EngineClient:
    """Return the engine with a span per computing call; the engine itself while tracing is disabled."""
    return engine if _tracer is None else _TracedEngine(engine, _tracer)


class _TracedEngine(ForwardingEngine):
    def __init__(self, engine: EngineClient, tracer: Tracer) -> None:
        super().__init__(engine)
        self._tracer = tracer

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        """Trace the call. The span is never the current one, since the caller runs between two events."""
        attributes: dict[str, Attribute] = {
            _OPERATION: "text_completion",
            _MODEL: request.model,
            _BRANCHES: len(request.branches),
        }
        spent = dict.fromkeys((_INPUT, _CACHED, _OUTPUT), 0)
        begun = _begin(self._tracer, f"text_completion {request.model}", "client", attributes)
        with _end_span(begun):
            try:
                async for event in super().generate(request, stream=stream):
                    if isinstance(event, Completion):
                        spent[_INPUT] += event.prompt_tokens
                        spent[_CACHED] += event.cached_tokens
                        spent[_OUTPUT] += len(event.token_ids)
                    yield event
            finally:
                begun.set_attributes(spent)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        attributes: dict[str, Attribute] = {_OPERATION: "score", _MODEL: request.model, _BRANCHES: len(request.items)}
        begun = _begin(self._tracer, f"score {request.model}", "client", attributes)
        with _end_span(begun):
            results = await super().score(request)
            cached = sum(result.cached_tokens for result in results)
            begun.set_attributes({_CACHED: cached, _INPUT: cached + sum(result.computed_tokens for result in results)})
            return results


def _begin(tracer: Tracer, name: str, kind: Kind, attributes: Mapping[str, Attribute], parent: str = "") -> Span:
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": parent}) if parent else None
    return tracer.start_span(name, context, SpanKind[kind.upper()], attributes)


@contextlib.contextmanager
def _end_span(begun: Span) -> Iterator[None]:
    """End a span, recording the type of an exception but not its message, which may quote a client."""
    from opentelemetry.trace import StatusCode

    try:
        yield
    except Exception as error:
        begun.set_attribute(_ERROR, type(error).__name__)
        begun.set_status(StatusCode.ERROR)
        raise
    finally:
        begun.end()
