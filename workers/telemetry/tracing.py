"""OpenTelemetry traces of requests, of the attempts at the jobs that they submit, and of the jobs' engine calls.

Disabled, and OpenTelemetry is not imported, until ``start_tracing`` finds a configured collector. A job continues the
trace of its request in any process, through its ``Origin``. No span contains a problem or an answer.

What a job did, node by node, is in spans by the GenAI semantic conventions, which an API process makes of its events
when it has ended (``span_export``). The spans here say in which process and when; their tokens have names of our own,
so that no reader counts a token twice.
"""

from __future__ import annotations

import contextlib
import os
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
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
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
MODEL, BRANCHES = "reasoner.engine.model", "reasoner.engine.branches"
PROMPT, CACHED, GENERATED = "reasoner.engine.prompt", "reasoner.engine.cached", "reasoner.engine.generated"
_ERROR = "error.type"

CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""OpenTelemetry's variable that allows questions and answers in spans."""
_CONTENT_VALUES = {
    "": False,
    "false": False,
    "no_content": False,
    "event_only": False,
    "true": True,
    "span_only": True,
    "span_and_event": True,
}
FLUSH_SECONDS = 2.0
"""The longest time that the end of a process waits for a collector."""

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
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = make_exporter(settings.otlp_url)
    except ModuleNotFoundError:
        raise ConfigError("otlp_url: traces need more packages: pip install 'reasoner[otel]'") from None
    captures_content()  # a mistake in it ends the start
    provider = TracerProvider(resource=make_resource(role))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace_with(provider)
    global _flush
    _flush = provider.force_flush


def make_exporter(otlp_url: str) -> SpanExporter:
    """Return an exporter to a collector. Raises ``ModuleNotFoundError`` without the extra ``reasoner[otel]``."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=f"{otlp_url.rstrip('/')}/v1/traces", session=_make_session(otlp_url))


def make_resource(role: str) -> Resource:
    """Return the resource of a role's spans."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    return Resource.create({SERVICE_NAME: f"reasoner-{role}"})


def captures_content() -> bool:
    """Return True if spans may hold questions and answers. Raises ``ConfigError`` for an unknown value."""
    value = os.environ.get(CONTENT_VARIABLE, "")
    try:
        return _CONTENT_VALUES[value.lower()]
    except KeyError:
        known = ", ".join(filter(None, _CONTENT_VALUES))
        raise ConfigError(f"{CONTENT_VARIABLE}: {value!r} is none of its values: give one of {known}") from None


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
        sending.join(FLUSH_SECONDS)


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
        attributes: dict[str, Attribute] = {MODEL: request.model, BRANCHES: len(request.branches)}
        spent = dict.fromkeys((PROMPT, CACHED, GENERATED), 0)
        begun = _begin(self._tracer, f"generate {request.model}", "client", attributes)
        with _end_span(begun):
            try:
                async for event in super().generate(request, stream=stream):
                    if isinstance(event, Completion):
                        spent[PROMPT] += event.prompt_tokens
                        spent[CACHED] += event.cached_tokens
                        spent[GENERATED] += len(event.token_ids)
                    yield event
            finally:
                begun.set_attributes(spent)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        attributes: dict[str, Attribute] = {MODEL: request.model, BRANCHES: len(request.items)}
        begun = _begin(self._tracer, f"score {request.model}", "client", attributes)
        with _end_span(begun):
            results = await super().score(request)
            cached = sum(result.cached_tokens for result in results)
            begun.set_attributes({CACHED: cached, PROMPT: cached + sum(result.computed_tokens for result in results)})
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
