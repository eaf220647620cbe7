"""Routes about the service itself: strategies, models, health, readiness and metrics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from api.anthropic.errors import AnthropicErrorDocument
from api.anthropic.models import AnthropicModel, AnthropicVersion, ModelPage, list_page
from api.http.metrics import render_metrics
from api.http.principal import AnyPrincipal, MetricsReader
from api.http.problems import RETRY_AFTER, Problem, ProblemDocument
from api.http.state import ServiceState, State
from api.openai.errors import ErrorDocument
from engine.protocol.types import EngineError, ModelInfo
from engine.protocol.wire import write_model
from reasoner.admission.names import OFFERED_EFFORTS, NamedFields, find_model, find_name
from reasoner.admission.resolve import describe_defaults
from reasoner.jobs.spec import DEFAULT_STRATEGY, FALLBACK_STRATEGY
from reasoner.plugins import STRATEGIES_GROUP, VERIFIERS_GROUP, list_unusable
from reasoner.search.policies.selection import can_generate
from reasoner.strategies.registry import describe_strategies
from reasoner.verifiers.registry import describe_verifiers
from workers.store.broker_errors import BROKER_DOWN, describe_outage

router = APIRouter(tags=["service"], responses={"default": {"model": ProblemDocument}})
_MODEL_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorDocument | AnthropicErrorDocument}}
"""Errors have the form of the client: Anthropic's if it sends ``anthropic-version``, else OpenAI's."""


@router.get("/v1/strategies", summary="Strategies and the JSON schemas of their parameters")
async def strategies(state: State, _: AnyPrincipal) -> dict[str, Any]:
    """``default`` is the strategy of a job that names none. Strategies that are not ``available`` need a verifier, and
    the service has no process reward model: the job must bring a ``verifier`` of its own. ``package`` is where a
    strategy comes from, ``left_out`` are those of other packages that cannot be used, with the reason."""
    has_verifier = state.settings.default_verifier(state.settings.model_name) is not None
    listed = [
        {"name": name, "available": has_verifier or not schema["needs_verifier"], **schema}
        for name, schema in describe_strategies().items()
    ]
    default = DEFAULT_STRATEGY if has_verifier else FALLBACK_STRATEGY
    return {"default": default, "data": listed, "left_out": _list_left_out(STRATEGIES_GROUP)}


@router.get("/v1/verifiers", summary="Kinds of verifiers and the JSON schemas of their fields")
async def verifiers(_: AnyPrincipal) -> dict[str, Any]:
    """``package`` is where a kind comes from, ``left_out`` are those of other packages that cannot be used."""
    listed = [{"kind": kind, **schema} for kind, schema in describe_verifiers().items()]
    return {"data": listed, "left_out": _list_left_out(VERIFIERS_GROUP)}


@router.get("/v1/models", responses=_MODEL_ERRORS, summary="Models, and names of searches")
async def models(
    page: Annotated[ModelPage, Query()],
    state: State,
    principal: AnyPrincipal,
    anthropic_version: AnthropicVersion = None,
) -> dict[str, Any]:
    """Models that the engines serve, then the names that stand for a search (``stands_for``). One whose server does not
    answer now is not ``available``: its jobs wait. ``default`` is the model of a job that names none. ``defaults`` are
    the values in use for the fields that a job of the model leaves open; null for a model that only scores. The
    parameters are those of Anthropic's clients."""
    listed = [entry for word, entry in (await _list_models(state)).items() if principal.may_use(word)]
    if anthropic_version is not None:
        return list_page(listed, page).model_dump()
    return {"object": "list", "default": state.settings.model_name, "data": listed}


@router.get("/v1/models/{model:path}", responses=_MODEL_ERRORS, summary="Show a model")
async def model(
    model: Annotated[str, Path(description="A served model, or a name.")],
    state: State,
    principal: AnyPrincipal,
    anthropic_version: AnthropicVersion = None,
) -> dict[str, Any]:
    listed = await _list_models(state, model)
    if model not in listed or not principal.may_use(model):
        words = ", ".join(filter(principal.may_use, listed)) or "none"
        raise Problem(404, "unknown-model", f"there is no model {model!r}; served are {words}")
    return listed[model] if anthropic_version is None else AnthropicModel.from_listed(listed[model]).model_dump()


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", summary="Check that this process is alive")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", summary="Check that a job submitted now can run")
async def readyz(state: State) -> Response:
    failures = []
    try:
        await state.store.check_broker()
    except BROKER_DOWN as error:
        failures.append(("broker", describe_outage(error)))
    try:
        await state.catalog.refresh()
        failures += [("models", problem) for problem in await state.readiness.problems(state.settings)]
    except EngineError as error:
        failures.append(("engine", str(error)))
    if failures:
        detail = "; ".join(f"{name}: {message}" for name, message in failures)
        raise Problem(503, "not-ready", detail, errors=failures, headers=RETRY_AFTER)
    engine = state.catalog.find_absence() or "ok"
    document = {"status": "ready", "broker": "ok", "engine": engine, "configuration": state.live.problem or "ok"}
    return JSONResponse(document | {"engines": _describe_engines(state)})


def _is_archive_up(state: ServiceState) -> bool | None:
    return None if state.archiver is None else not state.archiver.outage


@router.get("/metrics", response_class=PlainTextResponse, summary="Prometheus metrics")
async def metrics(state: State, _: MetricsReader) -> Response:
    await state.catalog.refresh()
    counts, counters = await state.store.get_stats()
    text = render_metrics(
        counts,
        counters,
        engines=state.catalog.engines(),
        queues=await state.store.get_queues(),
        queue_cap=state.settings.queue_cap,
        memory=await state.store.get_memory(),
        archive_up=_is_archive_up(state),
    )
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _list_left_out(group: str) -> list[dict[str, str]]:
    return [
        {"name": plugin.name, "package": plugin.package, "reason": plugin.reason}
        for plugin in list_unusable()
        if plugin.group == group
    ]


async def _list_models(state: ServiceState, more: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the models and the names by word, with the fields of OpenAI's model object.

    ``more`` is a further name to include. ``created`` is when this process started.
    """
    try:
        answering = {info.id for info in await state.catalog.list_answering()}
    except EngineError as error:
        raise Problem(503, "engine-unavailable", str(error), headers=RETRY_AFTER) from None
    served = await state.catalog.list_known()
    common = {"object": "model", "created": int(state.started_at), "owned_by": "reasoner"}
    listed = {
        info.id: common
        | write_model(info)
        | {"available": info.id in answering, "defaults": _describe_model(info, state)}
        for info in served
    }
    ids, writing = list(listed), {info.id: info for info in served if can_generate(info)}
    offered = [f"{model}:{effort}" for model in writing for effort in OFFERED_EFFORTS]
    for word in (*state.settings.names, *offered, *([] if more is None else [more])):
        name = find_name(word, state.settings, ids)
        targets = [] if name is None else [find_model(target, state.settings, ids) for target in name.targets]
        present = sorted((target for target in targets if target in writing), key=lambda each: each not in answering)
        if name is not None and present:
            info = writing[present[0]]
            listed[word] = common | write_model(info) | {"available": info.id in answering}
            listed[word] |= _describe_name(name, targets, info, state)
    return listed


def _describe_name(name: NamedFields, targets: list[str], info: ModelInfo, state: ServiceState) -> dict[str, Any]:
    entry = state.settings.names.get(name.name)
    return {
        "id": name.name,
        "description": entry and entry.description,
        "stands_for": {"models": targets, "fixed": sorted(name.fixed)},
        "defaults": describe_defaults(info, state.settings, name.name),
    }


def _describe_model(info: ModelInfo, state: ServiceState) -> dict[str, Any] | None:
    return describe_defaults(info, state.settings) if can_generate(info) else None


def _describe_engines(state: ServiceState) -> list[dict[str, str]]:
    """Return each engine with its state, and why it is not up. One engine that is up makes the service ready."""
    return [
        {"engine": engine.name, "state": engine.state} | ({} if engine.error is None else {"reason": str(engine.error)})
        for engine in state.catalog.engines()
    ]
