"""The references of strategies and verifiers, from the pydantic models of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from docs.generate.tables import fields, table
from reasoner.plugins import OWN_PACKAGE


def strategies(schemas: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of the strategies; ``schemas`` is what ``GET /v1/strategies`` answers with."""
    rows = [
        (
            f"[`{name}`](#{name})",
            schema["summary"],
            "yes" if schema["needs_verifier"] else "no",
            "yes" if schema["stops_when_sure"] else "no",
        )
        for name, schema in schemas.items()
    ]
    parts = [
        "# Strategies\n",
        "A job names its strategy and the strategy's parameters side by side: "
        '`"strategy": {"name": "beam", "n": 16}`, on the command line `--strategy beam --n 16`. '
        "`GET /v1/strategies` answers with the same tables as JSON Schema.\n",
        table(("name", "", "needs a verifier", "stops by `confidence`"), rows),
    ]
    for name, schema in schemas.items():
        summary = f"{schema['summary']}\n".replace("``", "`")
        own = [f"[Its paper, and what is measured of it](../strategies/{name}.md).\n"]
        parts += [
            f"## {name}\n",
            summary,
            *(own if schema["package"] == OWN_PACKAGE else []),
            _fields(schema["parameters"]),
        ]
    return "\n".join(parts)


def verifiers(kinds: Mapping[str, Any]) -> str:
    """Return the page of the verifiers; ``kinds`` are their pydantic models by name."""
    parts = [
        "# Verifiers\n",
        'A job names its verifier by `kind`: `"verifier": {"kind": "numeric", "expected": 220}`. Without a `kind` it '
        "is a process reward model; `null` is no verifier.\n",
        table(
            ("kind", "scores", ""),
            (
                (f"[`{name}`](#{name})", "every step" if kind.scores_steps else "finished solutions", _first(kind))
                for name, kind in kinds.items()
            ),
        ),
    ]
    for name, kind in kinds.items():
        parts += [f"## {name}\n", f"{_paragraph(kind)}\n", _fields(kind.model_json_schema())]
    return "\n".join(parts)


def _fields(schema: Mapping[str, Any]) -> str:
    return fields(dict(schema)) if schema.get("properties") else "It has no parameters.\n"


def _paragraph(kind: Any) -> str:
    return (kind.__doc__ or "").replace("``", "`").strip()


def _first(kind: Any) -> str:
    return _paragraph(kind).split("\n\n")[0]
