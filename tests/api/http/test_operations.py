"""Paths, methods and query parameters read from the routes are those of the OpenAPI document."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute, iter_route_contexts

from api.app.app import create_app
from api.http.operations import list_methods, list_query_parameters
from workers.config.settings import Settings


def test_methods_are_those_of_the_document(settings: Settings) -> None:
    app = create_app(settings)
    assert {path: {method.upper() for method in item} for path, item in app.openapi()["paths"].items()} == list_methods(
        app
    )


def test_query_parameters_are_those_of_the_document(settings: Settings) -> None:
    app = create_app(settings)
    documented = {
        (path, method.upper()): [each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"]
        for path, item in app.openapi()["paths"].items()
        for method, operation in item.items()
    }
    assert any(documented.values())
    assert documented == _read_query_parameters(app)


def _read_query_parameters(app: FastAPI) -> dict[tuple[str, str], list[str]]:
    return {
        (context.path_format or "", method): list_query_parameters(Request({"type": "http", "route": route}))
        for context in iter_route_contexts(app.routes)
        if isinstance(route := context.original_route, APIRoute) and context.include_in_schema
        for method in route.methods
    }
