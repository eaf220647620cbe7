"""The reference of the command line, from typer's commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import typer

from docs.generate.tables import code, table


def page(app: typer.Typer) -> str:
    """Return a page with every command and its options."""
    introduction = (
        "# Command line\n\nEvery command takes `--help`. Exit status: 0 success, 1 failure, 2 wrong usage, "
        "130 interrupted by Ctrl-C.\n"
    )
    return "\n".join([introduction, *_commands(typer.main.get_command(app), "reasoner")])


def _commands(command: Any, name: str) -> Iterator[str]:
    children = list_children(command)
    if name != "reasoner":
        yield _command(command, name, has_children=bool(children))
    for child_name, child in children.items():
        yield from _commands(child, f"{name} {child_name}")


def list_children(command: Any) -> dict[str, Any]:
    """Return the commands of a group by name; of a single command none."""
    if not hasattr(command, "list_commands"):
        return {}
    context = click.Context(command)
    return {name: command.get_command(context, name) for name in command.list_commands(context)}


def _command(command: Any, name: str, *, has_children: bool) -> str:
    level = "##" if name.count(" ") == 1 else "###"
    parts = [f"{level} {name}\n", _paragraphs(command.help or command.short_help or "")]
    if not has_children:
        with click.Context(command, info_name=name) as context:
            parts.append(f"```text\n{' '.join([name, *command.collect_usage_pieces(context)])}\n```\n")
        rows = [_parameter(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            parts.append(table(("argument or option", "default", ""), rows))
    return "\n".join(parts)


def _parameter(parameter: Any) -> tuple[str, str, str]:
    is_argument = parameter.param_type_name == "argument"
    names = [parameter.name.upper()] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    default = parameter.default
    has_default = default is not None and not callable(default) and default is not False and not is_argument
    is_unset = "UNSET" in repr(default).upper()
    text = getattr(parameter, "help", None) or ""
    if getattr(parameter, "envvar", None):
        text += f" Environment: `{parameter.envvar}`."
    return ", ".join(map(code, names)), code(default) if has_default and not is_unset else "", text


def _paragraphs(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines()).replace("``", "`") + "\n"
