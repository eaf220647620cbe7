"""Limits of owners: request rate, concurrent requests, and size of jobs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.principal import Principal
from api.http.problems import Problem, broker_problem, refusal_response
from api.http.state import ServiceState
from reasoner.budget.spec import Budget
from workers.config.rate_limits import Limits
from workers.config.settings import Settings
from workers.store.broker_errors import BROKER_DOWN
from workers.store.jobs import JobStore

_RETRY_SECONDS = "1"


@dataclass(frozen=True, slots=True)
class RequestsLeft:
    """The rest of a key's bucket of requests, after the one that is being answered."""

    rate: float
    """Requests a second that are added to it."""
    burst: int
    left: int
    full_seconds: int
    """Time after which the bucket is full."""

    @property
    def headers(self) -> dict[str, str]:
        """The fields of draft-ietf-httpapi-ratelimit-headers-10."""
        return {
            "RateLimit-Policy": f'"requests";q={self.burst};w={math.ceil(self.burst / self.rate)}',
            "RateLimit": f'"requests";r={self.left};t={self.full_seconds}',
        }


class RateLimitMiddleware:
    """Takes one token of the key's bucket for each request and counts its open requests. Answers 429 over a limit.

    Responses say how much is left in the fields of draft-ietf-httpapi-ratelimit-headers-10.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal: Principal | None = scope.get("state", {}).get("principal")
        if principal is None:  # a path that needs no key
            await self._app(scope, receive, send)
            return
        state: ServiceState = scope["app"].state.service
        limits, rate_headers = state.settings.limits.for_owner(principal.owner), {}
        try:
            if limits.bucket is not None:
                left, wait_seconds = await _take_token(state.store, principal.key_id, *limits.bucket)
                scope["state"]["requests_left"], rate_headers = left, left.headers
                if wait_seconds is not None:
                    raise _rate_limited_by(left, wait_seconds)
            if self._num_open[principal.key_id] >= limits.streams:
                detail = f"{limits.streams} requests of this key are open, which is its limit: wait for one to end"
                raise _rate_limited(detail, _RETRY_SECONDS)
        except Problem as problem:
            await refusal_response(scope, problem)(scope, receive, send)
            return
        except BROKER_DOWN as error:
            await refusal_response(scope, broker_problem(error))(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(rate_headers)
            await send(message)

        self._num_open[principal.key_id] += 1
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            self._num_open[principal.key_id] -= 1
            if not self._num_open[principal.key_id]:
                del self._num_open[principal.key_id]


def apply_caps(job: dict[str, Any], requested: Budget, limits: Limits) -> dict[str, Any]:
    """Return the resolved job with the owner's limits as its budget where it has none.

    ``requested`` is the budget in the request. Raises ``Problem`` for a job over a limit: nothing that was requested is
    cut silently.
    """
    budget = job["budget"]
    caps = {"tokens": limits.tokens, "seconds": limits.seconds}
    for name, cap in caps.items():
        if cap is not None and (
            budget[name] is None or (getattr(requested, name) is None and requested.effort is None)
        ):
            budget[name] = cap if budget[name] is None else min(cap, budget[name])
    parameters = job["strategy"]
    _check_caps(
        [
            *((f"budget.{name}", budget[name], cap) for name, cap in caps.items()),
            ("strategy.n", parameters.get("n"), limits.n),
            ("strategy.max_steps", parameters.get("max_steps"), limits.depth),
            ("candidates", len(job["candidates"] or ()), limits.n),
        ]
    )
    _check_lengths(job, limits.message_chars)
    return job


def add_quota_budget(job: dict[str, Any], limits: Limits, settings: Settings) -> dict[str, Any]:
    """Return the job with a token budget if its owner has a token quota, which reserves whole budgets."""
    budget = job["budget"]
    if budget["tokens"] is None and limits.tokens_a_day is not None:
        budget["tokens"] = min(settings.budget_tokens, limits.tokens_a_day)
    return job


def check_daily_tokens(budget: Mapping[str, Any], limits: Limits) -> None:
    """Raise ``Problem`` for a budget that no day's quota of its owner has room for, so that no waiting helps."""
    _check_caps([("budget.tokens", budget["tokens"], limits.tokens_a_day)])


def check_batch_budget(budget: Mapping[str, int], num_jobs: int, limits: Limits) -> None:
    """Raise ``Problem`` for a shared budget over the sum of the limits of its jobs."""
    _check_caps([("budget.tokens", budget["tokens"], None if limits.tokens is None else limits.tokens * num_jobs)])


def _check_caps(fields: list[tuple[str, Any, Any]]) -> None:
    """Raise ``Problem`` if a field, given as its name, its value and its cap, is over the cap."""
    errors = [
        (field, f"{_format(value)} is more than your limit of {_format(cap)}")
        for field, value, cap in fields
        if cap is not None and value is not None and value > cap
    ]
    _refuse(errors)


def _format(number: float) -> str:
    """Return a number with all its digits before the point, which ``g`` alone would round."""
    return str(int(number)) if number == int(number) else f"{number:g}"


def _check_lengths(job: dict[str, Any], cap: int) -> None:
    """Raise ``Problem`` if a text of the job has more characters than the cap."""
    if _find_longest(job) <= cap:
        return
    _refuse(
        [
            (field, f"it has {len(text)} characters, which is more than your limit of {cap} (limits.message_chars)")
            for field, text in _list_texts(job)
            if len(text) > cap
        ]
    )


def _find_longest(job: dict[str, Any]) -> int:
    """Return the number of characters of the longest text in a job: a twentieth of a submission with their paths."""
    longest, parts = 0, list[Any](job.values())
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            longest = max(longest, len(part))
        elif isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
    return longest


def _list_texts(part: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text in a part of a job, with its path."""
    if isinstance(part, str):
        yield path, part
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list | tuple) else ()
    for name, value in items:
        yield from _list_texts(value, f"{path}.{name}" if path else str(name))


def _refuse(errors: list[tuple[str, str]]) -> None:
    if errors:
        raise Problem(422, "over-limit", "; ".join(f"{field}: {message}" for field, message in errors), errors=errors)


async def _take_token(store: JobStore, key_id: str, rate: float, burst: int) -> tuple[RequestsLeft, int | None]:
    """Take a token out of a bucket. Return what is left, and the seconds to wait if the bucket is empty."""
    is_admitted, left, wait_ms, full_ms = await store.script("admit", key_id, repr(rate), burst)
    wait_seconds = None if is_admitted else max(1, math.ceil(wait_ms / 1000))
    return RequestsLeft(rate, burst, left, math.ceil(full_ms / 1000)), wait_seconds


def _rate_limited_by(left: RequestsLeft, wait_seconds: int) -> Problem:
    detail = (
        f"this key may send {left.rate:g} requests a second on average and {left.burst} at once: try again in "
        f"{wait_seconds} s"
    )
    return _rate_limited(detail, str(wait_seconds), left.headers)


def _rate_limited(detail: str, retry_after: str, headers: Mapping[str, str] | None = None) -> Problem:
    return Problem(429, "rate-limited", detail, headers={**(headers or {}), "Retry-After": retry_after})
