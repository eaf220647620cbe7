"""A proxy that writes down what a server answers, and a server that answers from such a file.

Requests are told apart by method, path and body. A request that the file does not hold is an error, so that a client
which sends something else fails until ``make test-vllm`` has asked the real server again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_ROOT = Path(__file__).parents[3]
_METHODS = ["GET", "POST"]


class Recorder:
    """A proxy in front of the server at ``url``."""

    def __init__(self, url: str) -> None:
        self.exchanges: list[dict[str, Any]] = []
        self._url = url
        self.app = Starlette(routes=[Route("/{path:path}", self._forward, methods=_METHODS)])

    def write(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        text = json.dumps(self.exchanges, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text.replace(f"{_ROOT}/", ""))  # the folder of a model depends on the machine

    async def _forward(self, request: Request) -> Response:
        content = await request.body()
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as http:
            answer = await http.request(
                request.method, request.url.path, content=content, headers={"Content-Type": "application/json"}
            )
        self.exchanges.append(
            {"request": await _identify(request), "status": answer.status_code, "answer": answer.text.splitlines()}
        )
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("Content-Type"))


class Replayer:
    """A server that gives the answers of a file, those to equal requests in their order."""

    def __init__(self, path: Path) -> None:
        self._answers: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for exchange in json.loads(path.read_text()):
            self._answers[json.dumps(exchange["request"], sort_keys=True)].append(exchange)
        self.app = Starlette(routes=[Route("/{path:path}", self._answer, methods=_METHODS)])

    async def _answer(self, request: Request) -> Response:
        asked = await _identify(request)
        answers = self._answers[json.dumps(asked, sort_keys=True)]
        if not answers:
            return Response(f"not recorded: {asked}", 500)
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return Response("\n".join(answer["answer"]) + "\n", answer["status"])


async def _identify(request: Request) -> dict[str, Any]:
    content = await request.body()
    body = json.loads(content) if content else None
    if body and "cache_salt" in body:
        body["cache_salt"] = "any"  # a random one
    return {"method": request.method, "path": request.url.path, "body": body}
