"""Random JSON Schemas of draft 2020-12, the same for the same seed, and keywords planted where they cannot be kept."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.seeds import shift

Schema = dict[str, Any]

NAMES = ("id", "name", "tags", "x", "x-size", "größe", "a/b", "c~d", "S_1", "two words")
TEXTS = ("", "a", "red", "tail\n", 'quote "', "back\\slash", "naïve", "日本", "😀", "1", "true", "null")
PATTERNS = (
    "^[a-z]+$", "^a", "z$", "b+", "^(red|green|blue)$", r"^\d{3}-\d{4}$", r"^[A-Z][a-z]{1,5}( [A-Z][a-z]{1,5})?$",
    r"^\w+@\w+\.\w+$", "^.{2,4}$", r"[0-9]{2}", "^[^0-9]*$", "^(ab|ba){1,3}$", "", r"^\S+$", "^a|b$", r"\.json$",
    "^x?$",
)  # fmt: skip
NAME_PATTERNS = ("^S_", "^x-", "_id$", "^[a-c]$", r"^\d+$", "a")
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
DECIMALS = (0.5, 1.5, -0.25, 0.1, 3.75, -12.5, 100.0, 0.001)
ANNOTATIONS: Schema = {
    "title": "a title", "description": "words", "default": None, "examples": [1], "deprecated": True, "readOnly": True,
    "writeOnly": False, "$comment": "a comment", "contentMediaType": "text/plain", "x-vendor": {"type": "odd"},
}  # fmt: skip
UNSUPPORTED: Schema = {
    "not": {"type": "string"}, "if": {"type": "string"}, "contains": {"type": "integer"}, "uniqueItems": True,
    "propertyNames": {"pattern": "^[a-z]"}, "dependentRequired": {"id": ["name"]}, "unevaluatedProperties": False,
    "dependentSchemas": {"id": {"required": ["name"]}}, "unevaluatedItems": False, "$dynamicRef": "#node",
}  # fmt: skip
"""Keywords that no grammar here can keep, with values that would forbid something."""


@dataclass(frozen=True, slots=True)
class Planted:
    """A schema with a keyword of ``UNSUPPORTED``, and the path of the schema that has it."""

    schema: Schema
    keyword: str
    path: str


def generate_schemas(seed: int, count: int) -> list[Schema]:
    """Return ``count`` schemas, each valid under the meta-schema; many constrain one thing by several keywords."""
    return [SchemaGenerator(random.Random(shift(f"{seed} {index}"))).generate() for index in range(count)]


def plant_keywords(seed: int, count: int) -> list[Planted]:
    """Return ``count`` schemas whose only fault is one unsupported keyword, at any depth."""
    planted = []
    for index in range(count):
        rng = random.Random(shift(f"planted {seed} {index}"))
        keyword = list(UNSUPPORTED)[index % len(UNSUPPORTED)]
        schema: Schema = {keyword: UNSUPPORTED[keyword]}
        steps: list[str] = []
        for _ in range(rng.randrange(4)):
            wrap, step = rng.choice(_WRAPPERS)
            schema = wrap(schema)
            steps.insert(0, step)
        planted.append(Planted(schema, keyword, "".join(f".{step}" for step in steps)))
    return planted


_WRAPPERS: tuple[tuple[Callable[[Schema], Schema], str], ...] = (
    (lambda inner: {"type": "object", "properties": {"name": inner, "x": {}}}, "properties.name"),
    (lambda inner: {"type": "object", "patternProperties": {"^S_": inner}}, "patternProperties.^S_"),
    (lambda inner: {"type": "object", "additionalProperties": inner}, "additionalProperties"),
    (lambda inner: {"type": "array", "items": inner}, "items"),
    (lambda inner: {"type": "array", "prefixItems": [{}, inner]}, "prefixItems.1"),
    (lambda inner: {"anyOf": [{"type": "null"}, inner]}, "anyOf.1"),
    (lambda inner: {"allOf": [inner, {"type": ["object", "string"]}]}, "allOf.0"),
)


class SchemaGenerator:
    """Writes one schema by chance; ``generate`` is called once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._definitions: Schema = {}

    def generate(self) -> Schema:
        """Return the schema, with the definitions that it refers to."""
        schema = self._write(self._rng.choice((1, 2, 2, 3)))
        if self._rng.random() < 0.2:
            schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        if self._definitions:
            schema["$defs"] = self._definitions
        return schema

    def _write(self, depth: int) -> Schema:
        leaves = (self._integer, self._number, self._string, self._string, self._enum, self._const, self._simple)
        nested = (self._object, self._object, self._object, self._array, self._array)
        combined = (self._any_of, self._one_of, self._all_of, self._reference, self._recursive, self._several_types)
        writers = (*leaves, *(nested * 2 + combined if depth else ()))
        schema: Schema = self._rng.choice(writers)(max(0, depth - 1))
        if self._rng.random() < 0.1:
            name = self._rng.choice(list(ANNOTATIONS))
            schema.setdefault(name, ANNOTATIONS[name])
        return schema

    def _any(self, depth: int) -> Schema | bool:
        """Return a schema, seldom a boolean one."""
        return self._write(depth) if self._rng.random() < 0.95 else self._rng.random() < 0.8

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _simple(self, depth: int) -> Schema:
        return self._rng.choice(({"type": "null"}, {"type": "boolean"}, {}, {"type": self._rng.choice(TYPES)}))

    def _integer(self, depth: int) -> Schema:
        schema: Schema = {"type": "integer"}
        low = self._rng.choice((-1000, -17, -1, 0, 1, 5, 99, 100))
        if self._chance(0.6):
            schema[self._rng.choice(("minimum", "exclusiveMinimum"))] = low
        if self._chance(0.6):
            schema[self._rng.choice(("maximum", "exclusiveMaximum"))] = low + self._rng.choice((0, 1, 2, 9, 100, 12345))
        if self._chance(0.25):
            schema["multipleOf"] = self._rng.choice((1, 2, 3, 7, 10, 25))
        return schema

    def _number(self, depth: int) -> Schema:
        schema: Schema = {"type": "number"}
        low = self._rng.choice((*DECIMALS, 0, -3))
        if self._chance(0.6):
            schema[self._rng.choice(("minimum", "exclusiveMinimum"))] = low
        if self._chance(0.6):
            schema[self._rng.choice(("maximum", "exclusiveMaximum"))] = low + self._rng.choice((0.5, 1, 2.25, 1000))
        if self._chance(0.25):
            schema["multipleOf"] = self._rng.choice((0.5, 0.01, 0.25, 2, 1.5))
        return schema

    def _string(self, depth: int) -> Schema:
        schema: Schema = {"type": "string"}
        if self._chance(0.35):
            schema["minLength"] = self._rng.choice((0, 1, 2, 5))
        if self._chance(0.35):
            schema["maxLength"] = schema.get("minLength", 0) + self._rng.choice((0, 1, 3, 20))
        if self._chance(0.35):
            schema["pattern"] = self._rng.choice(PATTERNS)
        elif self._chance(0.35):
            schema["format"] = self._rng.choice(FORMATS)
        return schema

    def _value(self) -> Any:
        numbers = (0, 1, -1, 42, 0.5, -2.25, 1.0, 1e3, 2**53, 2**60 if self._chance(0.2) else 7)
        flat = self._rng.choice((*TEXTS, *numbers, None, True, False))
        nested: tuple[Any, ...] = ([], [1, "a"], {}, {"a": 1}, {"id": None, "x": [True]}, [[0.5]])
        return flat if self._chance(0.8) else self._rng.choice(nested)

    def _enum(self, depth: int) -> Schema:
        texts = {json.dumps(self._value()): None for _ in range(self._rng.randint(1, 5))}
        values = {json.dumps(_unify(json.loads(text))): json.loads(text) for text in texts}
        schema: Schema = {"enum": list(values.values())}
        if self._chance(0.2):
            schema |= self._rng.choice(({"type": ["string", "integer", "null"]}, {"maxLength": 3}, {"minimum": 1}))
        return schema

    def _const(self, depth: int) -> Schema:
        return {"const": self._value()}

    def _several_types(self, depth: int) -> Schema:
        """Return a schema of several types, with keywords of some of them; sometimes without ``type``."""
        parts = self._rng.sample((self._integer, self._number, self._string, self._array, self._object), 2)
        first, second = (part(depth) for part in parts)
        types = [first["type"], second["type"], self._rng.choice(("null", "boolean"))]
        schema = first | second | {"type": types}
        if self._chance(0.2):
            del schema["type"]
        return schema

    def _object(self, depth: int) -> Schema:
        schema: Schema = {"type": "object"}
        names = self._rng.sample(NAMES, self._rng.choice((0, 1, 2, 2, 3, 4)))
        if names:
            schema["properties"] = {name: self._any(depth) for name in names}
        if names and self._chance(0.7):
            schema["required"] = self._rng.sample(names, self._rng.randint(1, len(names)))
            if self._chance(0.15):
                schema["required"].append("extra")
        if self._chance(0.2):
            patterns = self._rng.sample(NAME_PATTERNS, self._rng.choice((1, 1, 2)))
            schema["patternProperties"] = {pattern: self._any(depth) for pattern in patterns}
        if self._chance(0.6):
            schema["additionalProperties"] = False if self._chance(0.7) else self._any(depth)
        if self._chance(0.1):
            schema["minProperties"] = self._rng.choice((0, 1, 2, 3))
        if self._chance(0.1):
            schema["maxProperties"] = self._rng.choice((0, 1, 2, 3))
        return schema

    def _array(self, depth: int) -> Schema:
        schema: Schema = {"type": "array"}
        if self._chance(0.3):
            schema["prefixItems"] = [self._any(depth) for _ in range(self._rng.choice((1, 2, 3)))]
        if self._chance(0.8):
            schema["items"] = self._any(depth)
        if self._chance(0.4):
            schema["minItems"] = self._rng.choice((0, 1, 2, 4))
        if self._chance(0.4):
            schema["maxItems"] = schema.get("minItems", 0) + self._rng.choice((0, 1, 3))
        return schema

    def _any_of(self, depth: int) -> Schema:
        schema: Schema = {"anyOf": [self._any(depth) for _ in range(self._rng.choice((1, 2, 2, 3)))]}
        return schema | (self._rng.choice((self._object, self._string, self._simple))(0) if self._chance(0.25) else {})

    def _one_of(self, depth: int) -> Schema:
        kind = self._rng.randrange(3)
        if kind == 0:  # of different types
            parts = self._rng.sample((self._integer, self._string, self._array, self._object), 2)
            return {"oneOf": [part(depth) for part in parts]}
        if kind == 1:  # told apart by a property
            return {"oneOf": [self._tagged(tag, depth) for tag in ("circle", "square")]}
        return {"oneOf": [self._write(depth) for _ in range(2)]}

    def _tagged(self, tag: str, depth: int) -> Schema:
        properties = {"kind": {"const": tag}, "size": self._write(depth)}
        return {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}

    def _all_of(self, depth: int) -> Schema:
        writer = self._rng.choice((self._integer, self._number, self._string, self._object, self._array, self._enum))
        schema: Schema = {"allOf": [writer(depth) for _ in range(2)]}
        if self._chance(0.3):
            schema["allOf"].append(self._write(depth))
        return schema | (writer(depth) if self._chance(0.3) else {})

    def _reference(self, depth: int) -> Schema:
        name = self._rng.choice(("item", "a/b", "c~d", "per%cent", "größe"))
        if name not in self._definitions:
            self._definitions[name] = {}  # also for a reference within itself
            self._definitions[name] = self._write(depth)
        schema: Schema = {"$ref": f"#/$defs/{_escape(name)}"}
        return schema | (self._rng.choice((self._string, self._object, self._integer))(0) if self._chance(0.2) else {})

    def _recursive(self, depth: int) -> Schema:
        """Return a reference to a definition that may contain itself: a list, a tree or an expression."""
        reference = {"$ref": "#/$defs/node"}
        kind = self._rng.randrange(4)
        properties: Schema = {"value": self._write(0)}
        if kind == 0:
            properties["next"] = reference
        elif kind == 1:
            properties["next"] = {"anyOf": [reference, {"type": "null"}]}
        elif kind == 2:
            properties["children"] = {"type": "array", "items": reference}
        else:
            properties |= {"left": reference, "right": reference}
        node: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
        node["required"] = ["value", "next"] if kind == 1 else ["value"]
        self._definitions.setdefault("node", node)
        return dict(reference)


def _unify(value: Any) -> Any:
    """Return a value in which numbers that JSON Schema calls equal are written alike."""
    if isinstance(value, list):
        return [_unify(item) for item in value]
    if isinstance(value, dict):
        return {name: _unify(item) for name, item in value.items()}
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _escape(name: str) -> str:
    """Return a name as a step of a JSON pointer in the fragment of a URI."""
    return name.replace("~", "~0").replace("/", "~1").replace("%", "%25").replace("ö", "%C3%B6").replace("ß", "%C3%9F")
