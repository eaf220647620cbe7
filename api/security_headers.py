"""What every answer tells a browser: run nothing but this service's own files, guess no types, show it in no frame."""

from __future__ import annotations

import base64
import hashlib
import re

from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PAGE_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
_SWAGGER = "https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/"

HEADERS = {
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Harden:
    """Adds these headers, where the route has not said something else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def hardened_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith("/v1/"):  # what people ask is for nobody's cache
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, hardened_send)


def docs_page(title: str) -> HTMLResponse:
    """Swagger UI over ``/openapi.json``. It is loaded from a public address; its inline script is allowed by hash."""
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title=title,
        swagger_js_url=f"{_SWAGGER}swagger-ui-bundle.js",
        swagger_css_url=f"{_SWAGGER}swagger-ui.css",
        swagger_favicon_url="data:,",
    )
    scripts = re.findall(rb"<script>(.*?)</script>", bytes(page.body), re.DOTALL)
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in scripts)
    page.headers["Content-Security-Policy"] = (
        f"{PAGE_POLICY}; script-src {_SWAGGER} {hashes}; style-src {_SWAGGER} 'unsafe-inline'; img-src 'self' data:"
    )
    return page
