"""The pages: the dashboard at ``/`` (``api/dashboard``), the HTTP interface at ``/docs`` (``api/docs``), each with its
style and its scripts.

They hold no data, so they need no key: the dashboard asks for one where the service does, and then speaks to the same
API as every other client.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from api.http.middleware import PAGE_POLICY

DASHBOARD = Path(__file__).parents[1] / "dashboard"
DOCS = Path(__file__).parents[1] / "docs"
VENDORED = DOCS / "swagger_ui"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_DOCS_POLICY = f"{PAGE_POLICY}; img-src 'self' data:"
"""Swagger UI has its pictures in its style."""


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    tag: str


def _read(path: Path) -> _File:
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:16]
    return _File(content, f"{MEDIA_TYPES[path.suffix]}; charset=utf-8", f'"{digest}"')


def _files() -> dict[str, _File]:
    found: dict[str, _File] = {}
    for folder, under in ((DASHBOARD, "/dashboard"), (DOCS, "/docs"), (VENDORED, "/docs")):
        found |= {f"{under}/{path.name}": _read(path) for path in folder.iterdir() if path.suffix in MEDIA_TYPES}
    return {"/": found.pop("/dashboard/index.html"), "/docs": found.pop("/docs/index.html"), **found}


_FILES = _files()

router = APIRouter(include_in_schema=False)


def _serve(request: Request, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    file = _FILES[request.url.path]
    headers = {
        "ETag": file.tag,
        "Cache-Control": "no-cache",  # asked for again each time, sent again when it changed
    }
    if request.url.path == "/docs":
        headers["Content-Security-Policy"] = _DOCS_POLICY
    if if_none_match == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


for _path in sorted(_FILES):
    router.add_api_route(_path, _serve, methods=["GET", "HEAD"])
