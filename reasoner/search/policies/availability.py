"""Which of a search's several models answer: one whose server has been away for its time is given up, by name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from engine.protocol.refusal import Refusal
from engine.protocol.types import EngineClient, EngineError, EngineUnavailable, ModelInfo, SomeModelsAway
from reasoner.deadline import run_unless
from reasoner.jobs.journal import JobCancelled, Journal
from reasoner.jobs.spec import JobSpec
from reasoner.search.policies.policy import Policy
from reasoner.search.policies.selection import verifier_selector
from reasoner.tree import Node

MEMBERS = "members"
"""Key of the decision that a search begins without some of its models."""
_DECISION = f"decide:{MEMBERS}:"
RETRY_SECONDS = 1.0
"""Time between two attempts to reach a server that is away."""


class Availability:
    """The policies that do not answer, by their index in the search. ``clock`` returns seconds."""

    def __init__(self, policies: Sequence[Policy], clock: Callable[[], float] = time.monotonic) -> None:
        self._policies = policies
        self._clock = clock
        self._away_since: dict[int, float] = {}

    def record_answer(self, policy: int) -> None:
        """Record that a policy's server has answered."""
        self._away_since.pop(policy, None)

    def record_failure(self, policy: int) -> bool | None:
        """Record that a policy's server is away. Return True to ask again, and False to go on without the policy.

        ``None`` if no policy answers, so that the job waits as one with a single model does.
        """
        since = self._away_since.setdefault(policy, self._clock())
        if self._clock() < since + self._policies[policy].wait_seconds:
            return True
        return None if len(self._away_since) == len(self._policies) else False

    def find_pause(self, policy: int, error: EngineUnavailable, seconds_left: float | None) -> float:
        """Return the seconds before a policy's server is asked again: as many as it wants, within the policy's time.

        ``seconds_left``: of the job; ``None`` without a limit.
        """
        until_given_up = self._away_since[policy] + self._policies[policy].wait_seconds - self._clock()
        longest = until_given_up if seconds_left is None else min(until_given_up, seconds_left)
        return max(RETRY_SECONDS, min(error.retry_after or 0.0, longest))


async def find_members(
    spec: JobSpec,
    engine: EngineClient,
    journal: Journal,
    cancelled: asyncio.Event,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[dict[str, ModelInfo], list[str]]:
    """Return the served models by name, and those of the job's several that it goes on without, since they are away.

    Away models are waited for as long as they may be. A search that has begun keeps its models: one that is away now is
    as it was last seen, and is given up as one that goes away later. Raises ``EngineUnavailable`` if a model that the
    job needs is away, its verifier's among them, or one with which it began and of which nothing is known, and
    ``JobCancelled`` as soon as ``cancelled`` is set. ``clock`` returns seconds.
    """
    entries = [] if spec.models is None else await journal.load()
    left_out = next((entry.data["left_out"] for entry in entries if entry.key.startswith(_DECISION)), None)
    has_begun, began = bool(entries), clock()
    while True:
        try:
            return _index_models(await engine.models()), left_out or []
        except SomeModelsAway as error:
            away = _list_away(spec, error)
            if set(away) <= set(left_out or ()):
                return _index_models(error.known), left_out or []
            verifier = verifier_selector(spec.verifier)
            is_optional = set(away) < set(spec.policy_names) and (verifier is None or verifier.name not in away)
            last = _index_models(error.away)
            if has_begun and is_optional and set(away) - set(left_out or ()) <= last.keys():
                return last | _index_models(error.known), left_out or []
            if has_begun or not is_optional:
                raise
            if clock() >= began + _get_patience(spec, away):
                return _index_models(error.known), away
        await run_unless(cancelled, lambda: asyncio.sleep(RETRY_SECONDS))
        if cancelled.is_set():
            raise JobCancelled


def _index_models(infos: Sequence[ModelInfo]) -> dict[str, ModelInfo]:
    return {info.id: info for info in infos}


def _list_away(spec: JobSpec, error: SomeModelsAway) -> list[str]:
    """Return the models that the job names and no server that answers has."""
    verifier = verifier_selector(spec.verifier)
    named = [*spec.policy_names, *([verifier.name] if verifier is not None and verifier.name is not None else [])]
    known = {info.id for info in error.known}
    return [name for name in dict.fromkeys(named) if name not in known]


def _get_patience(spec: JobSpec, away: Sequence[str]) -> float:
    """Return the seconds for which the job waits for models that are away before it begins without them."""
    waits = [entry.patience for entry in spec.models or () if entry.model in away]
    return min(max(waits), spec.budget.seconds or float("inf"))


def without_members(spec: JobSpec, left_out: Sequence[str]) -> JobSpec:
    """Return the job with those of its models that are not left out."""
    models = [entry for entry in spec.models or () if entry.model not in left_out]
    if not left_out:
        return spec
    return spec.model_copy(update={"models": models if len(models) > 1 else None, "model": models[0].model})


def make_absence(error: EngineError) -> Refusal:
    """Return the end of a branch whose server is away."""
    return Refusal(str(error), None, "away")


def describe_absences(
    left_out: Sequence[str], root: Node, policies: Sequence[Policy], replaced: Mapping[int, str]
) -> str | None:
    """Return a sentence that names the models without which the search went on; ``None`` if it had all of them.

    ``replaced``: the reasons of those that another one replaced before a branch, by their index.
    """
    reasons = dict.fromkeys(left_out, "its server did not answer at the start")
    reasons |= {policies[policy].model.id: reason for policy, reason in replaced.items()}
    for node in root.walk():
        if node.refusal is not None and node.refusal.kind == "away":
            reasons.setdefault(policies[node.policy].model.id, node.refusal.message)
    if not reasons:
        return None
    return "went on without " + "; ".join(f"model {model!r}: {reason}" for model, reason in reasons.items())
