"""The OpenAPI document: what FastAPI derives from the routes, with error media types and examples added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from api.anthropic.errors import is_anthropic_path
from api.app import examples
from api.http.problems import MEDIA_TYPE
from api.openai.errors import is_openai_path
from reasoner.jobs.events import describe_events

Document = dict[str, Any]


def extend_openapi(app: FastAPI) -> None:
    """Add error media types and examples to the document that the application serves."""
    app.openapi = _complete_once(app.openapi)  # type: ignore[method-assign]  # FastAPI's own way to extend it


def _complete_once(build: Callable[[], Document]) -> Callable[[], Document]:
    document: Document = {}

    def build_completed() -> Document:
        if not document:
            document.update(build())
            schemas = document["components"]["schemas"]
            schemas.update({name: schema for name, schema in describe_events().items() if name not in schemas})
            for path, item in document["paths"].items():
                for method, operation in item.items():
                    _complete_operation(method.upper(), path, operation)
        return document

    return build_completed


def _complete_operation(method: str, path: str, operation: Document) -> None:
    call = f"{method} {path}"
    responses = operation["responses"]
    error = next(iter(responses["default"]["content"].values()))
    responses["default"]["description"] = "What was wrong, where, and what would be right"
    if is_anthropic_path(path):
        responses["default"]["content"] = {"application/json": error | {"example": examples.ANTHROPIC_ERROR}}
    elif is_openai_path(path):
        responses["default"]["content"] = {"application/json": error | {"example": examples.OPENAI_ERROR}}
    else:
        responses["default"]["content"] = {MEDIA_TYPE: error | {"example": examples.PROBLEM}}
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            parameter["example"] = examples.PATH_PARAMETERS.get(parameter["name"])
    for content in operation.get("requestBody", {}).get("content", {}).values():
        if "examples" not in content:
            content["examples"] = examples.BODIES.get(call, {})
    for status, example in examples.ANSWERS.get(call, {}).items():
        for kind, content in responses[status]["content"].items():
            content["example"] = examples.STREAMS.get(call, example) if kind == "text/event-stream" else example
