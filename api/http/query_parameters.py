"""Query parameters that a route does not have are refused, as fields of bodies are, and so is one that comes twice."""

from __future__ import annotations

from collections import Counter

from fastapi import Request

from api.http.problems import Problem


async def known_query(request: Request) -> None:
    """For routes of the OpenAPI document. Raises ``Problem``."""
    asked = Counter(name for name, _ in request.query_params.multi_items())
    if not asked:
        return
    operation = request.app.openapi()["paths"][request.scope["route"].path][request.method.lower()]
    known = [part["name"] for part in operation.get("parameters", ()) if part["in"] == "query"]
    there_are = f"known here are {', '.join(known)}" if known else "this call has none"
    errors = [(name, f"there is no such parameter; {there_are}") for name in asked if name not in known]
    errors += [(name, "give it once") for name, count in asked.items() if name in known and count > 1]
    if errors:
        detail = "; ".join(f"{name}: {message}" for name, message in errors)
        raise Problem(422, "invalid-request", detail, errors=errors)
