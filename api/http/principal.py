"""Who calls: what a key stands for, and which scopes a route asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer, SecurityScopes

from api.http.problems import Problem
from workers.store.keys import SCOPES, Scope

_bearer = HTTPBearer(auto_error=False, description="A key of 'reasoner keys create', or one of REASONER_API_KEYS.")


@dataclass(frozen=True, slots=True)
class Caller:
    """``owner`` is whom the jobs belong to that this caller submits."""

    key_id: str
    owner: str
    scopes: frozenset[Scope]

    @property
    def sees(self) -> str | None:
        """Whose jobs this caller may see: its owner's, or everybody's (``None``)."""
        return None if "admin" in self.scopes else self.owner


LOCAL: Final = Caller("local", "local", SCOPES)
"""Who calls a service that has no keys."""


def caller(request: Request, needed: SecurityScopes, _: Annotated[object, Depends(_bearer)] = None) -> Caller:
    """Whom ``api.http.middleware.Authenticate`` found. Raises ``Problem`` when a scope that the route needs is
    missing."""
    found: Caller = request.state.caller
    missing = [scope for scope in needed.scopes if scope not in found.scopes]
    if missing:
        raise Problem(
            403,
            "insufficient-scope",
            f"this key may {', '.join(sorted(found.scopes)) or 'nothing'}, and this call needs "
            f"{' and '.join(missing)}: use a key with that scope",
            headers={"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{" ".join(needed.scopes)}"'},
        )
    return found


Known = Annotated[Caller, Depends(caller)]
"""For routes that any key may call."""
Reader = Annotated[Caller, Security(caller, scopes=["jobs:read"])]
Writer = Annotated[Caller, Security(caller, scopes=["jobs:write"])]
MetricsReader = Annotated[Caller, Security(caller, scopes=["metrics:read"])]
Admin = Annotated[Caller, Security(caller, scopes=["admin"])]
