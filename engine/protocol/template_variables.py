"""Variables that a chat template reads, so that a misspelled one is refused and not ignored."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from engine.protocol.request_checks import RESERVED_TEMPLATE_NAMES, check_template_kwargs
from engine.protocol.types import InvalidRequest

if TYPE_CHECKING:
    from jinja2 import Environment

_SET_BY_RENDERER = RESERVED_TEMPLATE_NAMES | {"strftime_now", "tools", "documents"}
"""Names that a client does not have to set; tools and documents are accepted from one."""


@lru_cache(maxsize=32)
def find_template_variables(template: str) -> tuple[str, ...] | None:
    """Return the names of the variables that a client may set, sorted; ``None`` for a template that cannot be parsed.

    A variable that the template only assigns, or that its renderer sets, is none.
    """
    from jinja2 import TemplateError, meta

    try:
        found = meta.find_undeclared_variables(_make_environment().parse(template))
    except TemplateError:
        return None
    return tuple(sorted(name for name in found - _SET_BY_RENDERER if not name.endswith("_token")))


def compile_template(template: str) -> None:
    """Raise jinja2's ``TemplateSyntaxError`` with the line for a template that cannot be rendered at all."""
    _make_environment().compile(template, raw=True)


def _make_environment() -> Environment:
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """The block by which templates mark the assistant's own tokens (transformers)."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Environment(extensions=["jinja2.ext.loopcontrols", Generation], autoescape=False)


def check_template_variables(names: Iterable[str], template: str) -> None:
    """Raise ``InvalidRequest`` for a name that the template does not read, or that is set by the engine."""
    names = list(names)
    check_template_kwargs(names)
    known = find_template_variables(template)
    unknown = [name for name in names if known is not None and name not in (*known, "tools", "documents")]
    if unknown:
        has = f"its variables are {', '.join(known or ())}" if known else "it has none"
        raise InvalidRequest(
            f"chat_template_kwargs: the model's chat template has no variable {unknown[0]!r}: {has}",
            "chat_template_kwargs",
        )
