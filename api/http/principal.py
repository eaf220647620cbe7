"""The principal of a request, which its API key identifies, and the scopes that routes require."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer, SecurityScopes

from api.http.problems import Problem
from workers.store.keys import SCOPES, Scope

_bearer = HTTPBearer(auto_error=False, description="A key of 'reasoner keys create', or one of REASONER_API_KEYS.")


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request. Jobs that it submits belong to ``owner``."""

    key_id: str
    owner: str
    scopes: frozenset[Scope]
    models: frozenset[str] | None = None
    """The names and models that its jobs may give as a model; ``None`` for all."""

    def may_use(self, word: str) -> bool:
        """Return True for a name or model that its jobs may give as a model."""
        return self.models is None or word in self.models

    @property
    def visible_owner(self) -> str | None:
        """The owner whose jobs this principal may see; ``None`` for those of all owners."""
        return None if "admin" in self.scopes else self.owner


LOCAL_PRINCIPAL: Final = Principal("local", "local", SCOPES)
"""The principal of all requests to a service that has no keys."""


async def require_scopes(
    request: Request, required: SecurityScopes, _: Annotated[object, Depends(_bearer)] = None
) -> Principal:
    """Return the principal that ``AuthenticationMiddleware`` found. Raises ``Problem`` if it lacks a scope."""
    principal: Principal = request.state.principal
    check_scopes(principal, required.scopes)
    return principal


def check_scopes(principal: Principal, required: Sequence[str]) -> None:
    """Raise ``Problem`` if a principal lacks a scope."""
    missing = [scope for scope in required if scope not in principal.scopes]
    if missing:
        raise Problem(
            403,
            "insufficient-scope",
            f"this key has the scopes {', '.join(sorted(principal.scopes)) or '(none)'}, and this call needs "
            f"{' and '.join(missing)}: use a key with that scope",
            headers={"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{" ".join(required)}"'},
        )


AnyPrincipal = Annotated[Principal, Depends(require_scopes)]
"""Dependency of routes that any key may call."""
Reader = Annotated[Principal, Security(require_scopes, scopes=["jobs:read"])]
Writer = Annotated[Principal, Security(require_scopes, scopes=["jobs:write"])]
MetricsReader = Annotated[Principal, Security(require_scopes, scopes=["metrics:read"])]
Admin = Annotated[Principal, Security(require_scopes, scopes=["admin"])]
