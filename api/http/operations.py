"""Paths, methods and query parameters of the routes, without the OpenAPI document, which takes seconds to build."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_origin

from fastapi import FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import BaseModel


def list_methods(app: FastAPI) -> dict[str, set[str]]:
    """Return the documented methods of each path, with names in braces for its parameters."""
    methods: dict[str, set[str]] = {}
    for route in iter_route_contexts(app.routes):
        if isinstance(route.original_route, APIRoute) and route.include_in_schema:
            methods.setdefault(route.path_format or "", set()).update(route.methods or ())
    return methods


def list_query_parameters(request: Request) -> list[str]:
    """Return the names of the query parameters that the route of a request has."""
    return [*_iter_query_parameters(request.scope["route"].dependant), *list_object_parameters(request)]


def list_object_parameters(request: Request) -> list[str]:
    """Return the names of those that are objects, given a member each: ``metadata[team]=red``."""
    declared = (request.scope["route"].openapi_extra or {}).get("parameters", ())
    return [parameter["name"] for parameter in declared if parameter.get("style") == "deepObject"]


def list_repeatable_parameters(request: Request) -> list[str]:
    """Return the names of those that may be given several times, since they are lists."""
    return [
        name
        for field in request.scope["route"].dependant.query_params
        if isinstance(field.field_info.annotation, type) and issubclass(field.field_info.annotation, BaseModel)
        for name, inner in field.field_info.annotation.model_fields.items()
        if get_origin(inner.annotation) is list
    ]


def _iter_query_parameters(dependant: Dependant) -> Iterator[str]:
    for field in dependant.query_params:
        kind = field.field_info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):  # a parameter for each of its fields
            yield from (inner.alias or name for name, inner in kind.model_fields.items())
        else:
            yield field.alias
    for dependency in dependant.dependencies:
        yield from _iter_query_parameters(dependency)
