"""Prompt templates of verifiers: a harmless part of Jinja, with a slot for each text that a model or a client wrote.

A template may come from a client. So it may output its variables, loop once over the list of steps, and branch, and
nothing else: no calls, no arithmetic, no loop inside a loop. What it can write is therefore at most its own length
times the number of steps.

Texts in slots cannot close the tags that surround them, nor begin a turn of a chat: a tag that the template itself
uses, with any number behind its name, and the control tokens of common chat models get a zero-width space behind their
first character. What remains possible: control tokens of other spellings, headings in a template without tags (those
published for GenRM and ThinkPRM have none), and persuasion in plain words, which no escaping prevents.
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
_TAG_NAME = re.compile(r"</?([A-Za-z][\w-]*)")
_CONTROL = re.compile(r"<(?=\||/?s>|(?:start|end)_of_turn>)|\[(?=/?INST\])")
"""First characters of the control tokens of ChatML, Llama, Gemma, Mistral and their relatives."""
_BREAK = "\u200b"
"""Zero-width space."""

Value = str | Sequence[str]


class TemplateRefused(ValueError):
    """A template that does more than it may, or less than it must."""


class PromptTemplate:
    """A checked template, whose values cannot write its own tags."""

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
        self._tags = frozenset(map(_drop_number, _TAG_NAME.findall(source)))

    def render(self, values: Mapping[str, Value]) -> str:
        """Return the prompt with these values in their slots."""
        return self._template.render(
            {
                name: self._escape(value) if isinstance(value, str) else [self._escape(text) for text in value]
                for name, value in values.items()
            }
        ).strip()

    def _escape(self, text: str) -> str:
        """Return a text that contains none of the template's tags and no control token."""

        def escape_tag(match: re.Match[str]) -> str:
            is_own = _drop_number(match[1]) in self._tags
            return f"<{_BREAK}{match[0][1:]}" if is_own else match[0]

        return _CONTROL.sub(lambda match: match[0] + _BREAK, _TAG_NAME.sub(escape_tag, text))


def _drop_number(tag: str) -> str:
    """Return a tag's name without the number at its end, which a template may write by a loop's index."""
    return tag.rstrip("0123456789")


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
