"""Prompt templates of verifiers: a harmless part of Jinja, with a slot for each text that a model or a client wrote.

A template may come from a client. So it may output its variables, loop once over the list of steps, and branch, and
nothing else: no calls, no arithmetic, no loop inside a loop. What it can write is therefore at most its own length
times the number of steps.

Texts in slots cannot close the tags that surround them, nor begin a turn of a chat: a tag that the template itself
uses, and the beginning ``<|`` of a chat model's control tokens, get a zero-width space behind their first character.
What remains possible is persuasion in plain words, which no escaping prevents.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template, nodes

MAX_TEMPLATE_CHARS = 32_000
_FILTERS = {"trim", "upper", "lower", "length", "join"}
_LOOP_FIELDS = {"index", "index0", "first", "last", "length"}
_TAG = re.compile(r"<(/?[A-Za-z][\w-]*)>")
_BREAK = "\u200b"
"""Zero-width space."""

Value = str | Sequence[str]


class TemplateRefused(ValueError):
    """A template that does more than it may, or less than it must."""


class PromptTemplate:
    """A checked template. ``tags`` are the tags of its own text, which no value can write."""

    def __init__(self, source: str, required: Collection[str], known: Collection[str]) -> None:
        """Raises ``TemplateRefused``. ``required``: variables that it must use; ``known``: all that it may."""
        self._template, self.variables = _compile(source)
        unknown = self.variables - set(known)
        if unknown:
            raise TemplateRefused(
                f"the template has no variable {min(unknown)!r}: its variables are {', '.join(sorted(known))}"
            )
        missing = sorted(set(required) - self.variables)
        if missing:
            raise TemplateRefused(
                f"the template does not use {{{{ {missing[0]} }}}}, without which the model would not see it; it needs "
                + ", ".join(f"{{{{ {name} }}}}" for name in sorted(required))
            )
        self.tags = frozenset(_TAG.findall(source))

    def render(self, values: Mapping[str, Value]) -> str:
        """Return the prompt with these values in their slots."""
        return self._template.render(
            {
                name: self.escape(value) if isinstance(value, str) else [self.escape(text) for text in value]
                for name, value in values.items()
            }
        ).strip()

    def escape(self, text: str) -> str:
        """Return a text that contains none of the template's tags and no beginning of a control token."""

        def escape_tag(match: re.Match[str]) -> str:
            is_own = match[1].lstrip("/") in {tag.lstrip("/") for tag in self.tags}
            return f"<{_BREAK}{match[1]}>" if is_own else match[0]

        return _TAG.sub(escape_tag, text).replace("<|", f"<{_BREAK}|")


@lru_cache(64)
def _compile(source: str) -> tuple[Template, frozenset[str]]:
    """Return the template and the variables that it reads. Raises ``TemplateRefused``."""
    from jinja2 import StrictUndefined, TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateRefused(f"the template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are allowed")
    try:
        tree = environment.parse(source)
    except TemplateError as error:
        raise TemplateRefused(f"the template is no Jinja: {error}") from None
    _check_nodes(tree, is_in_loop=False)
    return environment.from_string(source), frozenset(meta.find_undeclared_variables(tree))


def _check_nodes(node: nodes.Node, *, is_in_loop: bool) -> None:
    """Raise ``TemplateRefused`` for anything but text, variables, conditions and one loop."""
    from jinja2 import nodes

    allowed = (
        *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.Const, nodes.If, nodes.For, nodes.Filter),
        *(nodes.Getattr, nodes.Compare, nodes.Operand, nodes.Not, nodes.And, nodes.Or),
    )
    match node:
        case nodes.For() if is_in_loop or not isinstance(node.iter, nodes.Name) or node.recursive:
            raise TemplateRefused("a loop of a template goes over one variable and contains no other loop")
        case nodes.Filter() if node.name not in _FILTERS or node.args or node.kwargs:
            raise TemplateRefused(f"a template may use the filters {', '.join(sorted(_FILTERS))}, without arguments")
        case nodes.Getattr(node=nodes.Name(name="loop"), attr=field) if field in _LOOP_FIELDS:
            pass
        case nodes.Getattr():
            raise TemplateRefused(f"a template may read loop.{', loop.'.join(sorted(_LOOP_FIELDS))}, no other field")
        case _ if not isinstance(node, allowed):
            raise TemplateRefused(
                f"a template consists of text, {{{{ variables }}}}, conditions and one loop; it cannot use "
                f"{type(node).__name__} (line {node.lineno})"
            )
    for child in node.iter_child_nodes():
        _check_nodes(child, is_in_loop=is_in_loop or isinstance(node, nodes.For))
