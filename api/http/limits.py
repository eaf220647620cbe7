"""Holds callers to their limits: how often they may call, how much may be open at once, and how large a job may be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.principal import Caller
from api.http.problems import BROKER_UNAVAILABLE, Problem, refuse
from api.http.state import State
from reasoner.budget.spec import Budget
from workers.config.rate_limits import Limits
from workers.config.settings import Settings
from workers.store.jobs import BROKER_DOWN, JobStore

_RETRY_SECONDS = "1"


class LimitCallers:
    """One token of the key's bucket for every request, and a place among its open ones. 429 where there is none.

    Answers say how much is left in the fields of draft-ietf-httpapi-ratelimit-headers-10.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller | None = scope.get("state", {}).get("caller")
        if caller is None:  # a path that is open to all
            await self._app(scope, receive, send)
            return
        state: State = scope["app"].state.service
        limits, rate = state.settings.limits.of(caller.owner), {}
        try:
            if limits.bucket is not None:
                rate = await _take(state.store, caller.key_id, *limits.bucket)
            if self._open[caller.key_id] >= limits.streams:
                raise _rate_limited(f"{limits.streams} requests of this key are open, as many as may", _RETRY_SECONDS)
        except Problem as problem:
            await refuse(scope, problem)(scope, receive, send)
            return
        except BROKER_DOWN:
            await refuse(scope, BROKER_UNAVAILABLE)(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(rate)
            await send(message)

        self._open[caller.key_id] += 1
        try:
            await self._app(scope, receive, told)
        finally:
            self._open[caller.key_id] -= 1
            if not self._open[caller.key_id]:
                del self._open[caller.key_id]


def within(accepted: dict[str, Any], asked: Budget, limits: Limits) -> dict[str, Any]:
    """The job with the limits as its budget where it has none. ``asked`` is the budget that the client named.

    Raises ``Problem`` for one that asks for more than it may: nothing that was asked for is cut silently.
    """
    budget = accepted["budget"]
    caps = {"tokens": limits.tokens, "seconds": limits.seconds}
    for name, cap in caps.items():
        if cap is not None and (budget[name] is None or asked == Budget()):
            budget[name] = cap if budget[name] is None else min(cap, budget[name])
    parameters = accepted["strategy"]
    found = [
        *((f"budget.{name}", budget[name], cap) for name, cap in caps.items()),
        ("strategy.n", parameters.get("n"), limits.n),
        ("strategy.max_steps", parameters.get("max_steps"), limits.depth),
    ]
    _check(found)
    return accepted


def bookable(accepted: dict[str, Any], limits: Limits, settings: Settings) -> dict[str, Any]:
    """The job with a budget of tokens, if there is a quota of them: what cannot be booked cannot be held to it."""
    budget = accepted["budget"]
    if budget["tokens"] is None and limits.tokens_a_day is not None:
        budget["tokens"] = min(settings.budget_tokens, limits.tokens_a_day)
    return accepted


def batch_within(budget: Mapping[str, int], jobs: int, limits: Limits) -> None:
    """Raises ``Problem`` for a shared budget that is larger than those of so many jobs."""
    _check([("budget.tokens", budget["tokens"], None if limits.tokens is None else limits.tokens * jobs)])


def _check(found: list[tuple[str, Any, Any]]) -> None:
    """Of fields with their values and limits."""
    over = [
        (field, f"{value:g} is more than your limit of {cap:g}")
        for field, value, cap in found
        if cap is not None and value is not None and value > cap
    ]
    if over:
        raise Problem(422, "over-limit", "; ".join(f"{field}: {message}" for field, message in over), errors=over)


async def _take(store: JobStore, key_id: str, rate: float, burst: int) -> dict[str, str]:
    """Takes a token out of a bucket; answers what to tell of it. Raises ``Problem`` when it is empty."""
    admitted, left, wait_ms, full_ms = await store.script("admit", key_id, repr(rate), burst)
    headers = {
        "RateLimit-Policy": f'"requests";q={burst};w={math.ceil(burst / rate)}',
        "RateLimit": f'"requests";r={left};t={math.ceil(full_ms / 1000)}',
    }
    if not admitted:
        wait = str(max(1, math.ceil(wait_ms / 1000)))
        message = f"this key may send {rate:g} requests a second on average and {burst} at once: wait for {wait} s"
        raise _rate_limited(message, wait, headers)
    return headers


def _rate_limited(detail: str, retry_after: str, headers: Mapping[str, str] | None = None) -> Problem:
    return Problem(429, "rate-limited", detail, headers={**(headers or {}), "Retry-After": retry_after})
