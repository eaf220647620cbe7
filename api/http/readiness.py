"""Readiness of the models: the engines serve the policy and the verifier, so that a default job can run."""

from __future__ import annotations

import asyncio

import structlog

from api.http.model_catalog import ModelCatalog
from engine.protocol.types import (
    EngineClient,
    EngineError,
    EngineUnavailable,
    ModelInfo,
    SomeModelsAway,
    TokenizeRequest,
)
from prm.scorers.steps import StepScorer
from reasoner.jobs.verifier_specs import ProbeVerifier
from reasoner.search.policies.selection import can_generate, can_score_steps, verifier_selector
from workers.config.settings import Settings

TIMEOUT_SECONDS = 2.0
_QUESTION = [{"role": "user", "content": "?"}]

log = structlog.get_logger("reasoner.engines")


class Readiness:
    """Checks the policy and the verifier on the engines. A model that has passed is not checked again."""

    def __init__(self, engine: EngineClient, catalog: ModelCatalog) -> None:
        self._engine = engine
        self._catalog = catalog
        self._passed: dict[str, ModelInfo] = {}
        self._logged: list[str] = []

    async def problems(self, settings: Settings) -> list[str]:
        """Return what is wrong with the models; a list of problems is logged once until it changes.

        Nothing is wrong with a model that may be on a server which is away, as long as one that answers can write
        solutions. Raises ``EngineError`` when none can.
        """
        served, is_complete = await self._list_served(settings)
        needed = {settings.model_name: "REASONER_MODEL"}
        if settings.prm_name is not None:
            needed.setdefault(settings.prm_name, "REASONER_PRM")
        for name, profile in settings.models.items():
            if profile.path is not None or profile.url:
                needed.setdefault(name, f"models.{name}")
            verifier = verifier_selector(settings.default_verifier(name))
            if verifier is not None and verifier.name is not None and "verifier" in profile.list_given():
                needed.setdefault(verifier.name, f"models.{name}.verifier")
        problems = [
            problem
            for name, setting in needed.items()
            if (is_complete or name in served)
            and (problem := await self._find_problem(setting, name, served)) is not None
        ]
        problems += _find_missing_probes(settings, served)
        if problems and problems != self._logged:
            log.warning("not ready: default jobs would fail", problems=problems)
        self._logged = problems
        return problems

    async def _list_served(self, settings: Settings) -> tuple[dict[str, ModelInfo], bool]:
        """Return the models that answer by name, and True if these are all.

        Raises ``EngineError`` if none can write solutions, or the default policy's server has not started yet.
        """
        try:
            return {info.id: info for info in await self._catalog.models()}, True
        except SomeModelsAway as error:
            served = {info.id: info for info in error.known}
            policy = settings.model_name
            has_started = policy is None or policy in served or policy in self._passed
            if not has_started or not any(map(can_generate, error.known)):
                raise
            return served, False

    async def _find_problem(self, setting: str, name: str, served: dict[str, ModelInfo]) -> str | None:
        if name not in served:
            hint = "; to run without a verifier set REASONER_PRM=none" if setting == "REASONER_PRM" else ""
            return f"{setting} {name!r} is not served; served are {', '.join(sorted(served)) or 'none'}{hint}"
        if self._passed.get(name) == served[name]:
            return None
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                if setting == "REASONER_PRM" or can_score_steps(served[name]):
                    await StepScorer(self._engine, served[name]).encode_question(_QUESTION)
                elif served[name].kind == "generate":
                    await self._engine.tokenize(TokenizeRequest(name, _QUESTION))
        except TimeoutError:
            raise EngineUnavailable(f"the engine did not tokenize a prompt within {TIMEOUT_SECONDS:g} s") from None
        except EngineUnavailable:
            raise
        except EngineError as error:
            return f"{setting} {name!r}: {error}"
        self._passed[name] = served[name]
        return None


def _find_missing_probes(settings: Settings, served: dict[str, ModelInfo]) -> list[str]:
    """Return a problem for each model whose default verifier is a probe that its engine does not have."""
    problems = []
    for name in dict.fromkeys((settings.model_name, *settings.models)):
        match settings.default_verifier(name):
            case ProbeVerifier(model=other) if (info := served.get(other or name)) is not None and info.probe is None:
                problems.append(
                    f"models.{name}.verifier is a probe, but {info.id!r} has none: fit one with 'reasoner prm train "
                    "--probe', and serve it by --probe or from beside the weights"
                )
    return problems
