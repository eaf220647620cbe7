"""Web pages: the dashboard at ``/`` (``api/dashboard``) and the API reference at ``/docs`` (``api/docs``).

They contain no data and need no key, and their links are relative, so that they work below any path. The dashboard asks
for a key if the service does, and then uses the same API as every other client.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.staticfiles import StaticFiles

from api.http.middleware import PAGE_POLICY

DASHBOARD = Path(__file__).parents[1] / "dashboard"
DOCS = Path(__file__).parents[1] / "docs"
_DOCS_POLICY = f"{PAGE_POLICY}; img-src 'self' data:"
"""Policy of ``/docs``: the style sheet of Swagger UI contains its images."""

mimetypes.add_type("text/javascript", ".js")  # application/javascript before Python 3.12
_dashboard_files = StaticFiles(directory=DASHBOARD)
_docs_files = StaticFiles(directory=DOCS)

router = APIRouter(include_in_schema=False)


@router.head("/")
@router.get("/")
async def dashboard_page(request: Request) -> Response:
    return await _send_file(_dashboard_files, "index.html", request)


@router.head("/dashboard/{path:path}")
@router.get("/dashboard/{path:path}")
async def dashboard_file(path: str, request: Request) -> Response:
    return await _send_file(_dashboard_files, path, request)


@router.head("/docs")
@router.get("/docs")
async def docs_page(request: Request) -> Response:
    response = await _send_file(_docs_files, "index.html", request)
    response.headers["Content-Security-Policy"] = _DOCS_POLICY
    return response


@router.head("/docs/{path:path}")
@router.get("/docs/{path:path}")
async def docs_file(path: str, request: Request) -> Response:
    return await _send_file(_docs_files, path, request)


async def _send_file(files: StaticFiles, path: str, request: Request) -> Response:
    response = await files.get_response(path, request.scope)
    response.headers["Cache-Control"] = "no-cache"  # kept by browsers, and checked by its ETag before each use
    return response
