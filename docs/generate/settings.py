"""The reference of the settings, from their pydantic models."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel

from docs.generate.tables import code, default_of, fields, table, type_of


def page(settings: type[BaseModel], nested: dict[str, type[BaseModel]], live: frozenset[str]) -> str:
    """Return a page with every setting and, below, the fields of the ``nested`` tables of ``reasoner.toml``."""
    schema = settings.model_json_schema()
    rows = [
        (
            f"`REASONER_{name.upper()}`",
            _type(field),
            _default(field),
            field.get("description", "") + (" *Live.*" if name in live else ""),
        )
        for name, field in schema["properties"].items()
    ]
    parts = [
        "# Settings\n",
        "Settings come from the environment (`REASONER_MODEL=…`), then from `reasoner.toml` in the working directory "
        "(`model = …`: the same name in lower case, without the prefix), then from the defaults. Lists are separated "
        "by commas in the environment. A setting marked *live* takes effect in a running service when the file "
        "changes; the others take effect at the next start.\n",
        table(("setting", "type", "default", ""), rows),
    ]
    for title, model in nested.items():
        text = re.sub(r"``", "`", (model.__doc__ or "").strip().split("\n\n")[0])
        parts += [f"## {code(title)}\n", f"{text}\n", fields(model.model_json_schema())]
    return "\n".join(parts)


def _type(field: dict[str, Any]) -> str:
    return re.sub(r"`[A-Z]\w+`", "table", type_of(field))


def _default(field: dict[str, Any]) -> str:
    return default_of(field).replace(".0`", "`")
