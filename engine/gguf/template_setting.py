"""The chat template that an operator gives a model instead of its own: a file, a text, or plain continuation."""

from __future__ import annotations

from pathlib import Path

from engine.protocol.template_variables import compile_template
from engine.protocol.types import EngineError

PLAIN = "none"
"""The value for base models: a conversation is a plain text to continue."""
PLAIN_TEMPLATE = (
    r"{%- set turns = messages | rejectattr('role', 'in', ['system', 'developer']) | list | length -%}"
    r"{%- for message in messages -%}{{ '' if loop.first else '\n\n' }}"
    r"{{- message.role | capitalize ~ ': ' if turns > 1 and message.role not in ['system', 'developer'] else '' -}}"
    r"{{- message.content if message.content is string else message.content | default([], true) | map(attribute='text')"
    r" | join -}}{%- endfor -%}"
    r"{{- '\n\nAssistant:' if turns > 1 and add_generation_prompt else '' -}}"
)
"""The texts one after the other; several turns need the roles, and end where the assistant's next one begins."""
_MOST = 100_000
"""Characters: it is an argument of the engine's process, which Linux limits to 128 KiB."""


def anchor_template(value: str, folder: Path) -> str:
    """Return the value of a setting in ``folder``, the path of a file made absolute."""
    return value if value == PLAIN or _is_text(value) else str(folder.absolute() / Path(value).expanduser())


def read_template(value: str) -> str:
    """Return the template that a value stands for. Raises ``EngineError`` with the place of what is wrong in it."""
    if value == PLAIN:
        return PLAIN_TEMPLATE
    if not value.strip():
        raise EngineError(f"it is empty: give a .jinja file, the template's text, or {PLAIN!r} for plain continuation")
    from jinja2 import TemplateSyntaxError

    template, place = value, "the template's text"
    if not _is_text(value):
        place = value
        try:
            template = Path(value).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise EngineError(
                f"{value} cannot be read as a chat template: {error}; give a .jinja file, the template's text, or "
                f"{PLAIN!r} for plain continuation"
            ) from None
    if len(template) > _MOST or not template.strip():
        raise EngineError(f"{place} has {len(template)} characters; a chat template has 1 to {_MOST}")
    try:
        compile_template(template)
    except TemplateSyntaxError as error:
        raise EngineError(f"{place}, line {error.lineno}: it is no chat template: {error.message}") from None
    except RecursionError:
        raise EngineError(f"{place}: it is no chat template: it is nested too deeply") from None
    return template


def _is_text(value: str) -> bool:
    return "{{" in value or "{%" in value
