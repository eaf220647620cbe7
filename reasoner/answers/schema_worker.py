"""The child of ``reasoner.answers.json_schema``: decides if a text is JSON that is valid under a schema."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry

from reasoner.subprocess_worker import serve


def valid(question: dict[str, Any]) -> bool:
    """Return True if it is, with references into the schema alone; raise ``ValueError`` for what is no JSON."""
    document = json.loads(question["text"], parse_constant=_no_number)
    return bool(Draft202012Validator(question["schema"], registry=Registry()).is_valid(document))


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


if __name__ == "__main__":
    serve(valid)
