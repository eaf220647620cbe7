"""JSON schemas as agents read them best: what may be left out is not null, and nothing has a title of its own."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue


def build_schema(model: type[BaseModel], mode: JsonSchemaMode) -> dict[str, Any]:
    """Return the schema of a model whose documents leave out what is ``None``."""
    return model.model_json_schema(mode=mode, schema_generator=_Generator)


class _Generator(GenerateJsonSchema):
    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        document = super().default_schema(schema)
        if document.get("default", True) is None:
            del document["default"]
        return document

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False

    def field_is_required(self, field: Any, total: bool) -> bool:
        inner = field
        while "schema" in inner:
            inner = inner["schema"]
            if inner["type"] == "nullable":
                return False
        return super().field_is_required(field, total)
