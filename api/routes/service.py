"""What can be asked for, and how the service is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from api.http.metrics import exposition
from api.http.principal import Known, MetricsReader
from api.http.problems import RETRY_AFTER, Problem, ProblemDocument
from api.http.state import State, service
from api.openai.errors import ErrorDocument
from engine.protocol.types import EngineError
from reasoner.jobs.spec import DEFAULT_STRATEGY, FALLBACK_STRATEGY
from reasoner.strategies.registry import describe_strategies
from workers.store.jobs import BROKER_DOWN

Service = Annotated[State, Depends(service)]

router = APIRouter(tags=["service"], responses={"default": {"model": ProblemDocument}})


@router.get("/v1/strategies", summary="Strategies and the JSON schemas of their parameters")
async def strategies(state: Service, _: Known) -> dict[str, Any]:
    """``default`` is the strategy of a job that names none. Those that are not ``available`` need a verifier, and the
    service has no process reward model: the job must bring a ``verifier`` of its own."""
    verifies = state.settings.prm_name is not None
    listed = [
        {"name": name, "available": verifies or not schema["needs_verifier"], **schema}
        for name, schema in describe_strategies().items()
    ]
    return {"default": DEFAULT_STRATEGY if verifies else FALLBACK_STRATEGY, "data": listed}


@router.get("/v1/models", summary="Models that the engines serve")
async def models(state: Service, _: Known) -> dict[str, Any]:
    return {"object": "list", "data": list((await _models(state)).values())}


@router.get("/v1/models/{model:path}", responses={"default": {"model": ErrorDocument}}, summary="One of them")
async def model(model: Annotated[str, Path(description="Its name.")], state: Service, _: Known) -> dict[str, Any]:
    served = await _models(state)
    if model not in served:
        known = ", ".join(served) or "none"
        raise Problem(404, "unknown-model", f"there is no model {model!r}; served are {known}")
    return served[model]


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", summary="Whether this process is alive")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", summary="Whether a job that is submitted now can run")
async def readyz(state: Service) -> Response:
    failures = []
    try:
        await state.store.ping()
    except BROKER_DOWN as error:
        failures.append(("broker", f"cannot be reached: {type(error).__name__}"))
    try:
        await state.catalog.refresh()
        failures += [("models", problem) for problem in await state.readiness.problems(state.settings)]
    except EngineError as error:
        failures.append(("engine", str(error)))
    if failures:
        detail = "; ".join(f"{name}: {message}" for name, message in failures)
        raise Problem(503, "not-ready", detail, errors=failures, headers=RETRY_AFTER)
    told = {"status": "ready", "broker": "ok", "engine": "ok", "configuration": state.live.problem or "ok"}
    return JSONResponse(told | {"engines": _engines(state)})


@router.get("/metrics", response_class=PlainTextResponse, summary="Prometheus metrics")
async def metrics(state: Service, _: MetricsReader) -> Response:
    await state.catalog.refresh()
    return Response(
        exposition(*await state.store.stats(), state.catalog.engines()),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


async def _models(state: State) -> dict[str, dict[str, Any]]:
    """By name, with what OpenAI's clients look for: a model is as old as this process knows it to be."""
    try:
        served = await state.catalog.models()
    except EngineError as error:
        raise Problem(503, "engine-unavailable", str(error), headers=RETRY_AFTER) from None
    common = {"object": "model", "created": int(state.started_at), "owned_by": "reasoner"}
    return {info.id: common | asdict(info) for info in served}


def _engines(state: State) -> list[dict[str, str]]:
    """Each engine with its state, and why it is away. One is enough to be ready."""
    return [
        {"engine": known.name, "state": known.state} | ({} if known.error is None else {"reason": str(known.error)})
        for known in state.catalog.engines()
    ]
