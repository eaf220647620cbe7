"""The commands. Exit status: 0 success, 1 failure, 2 wrong usage, 128 + signal number (Ctrl-C: 130) interrupted.

The module of a command is imported when the command is called, so that ``--help`` needs none of them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from workers.processes.quiet_imports import end_quietly


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command: ``place`` is MODULE:NAME of its function, or of the ``Typer`` of a group.

    It is a text because some are of packages above this one, which imports none of them.
    """

    place: str
    help: str
    """The first sentence of its help, which a test compares."""
    options: dict[str, Any] = field(default_factory=dict)

    def load(self, name: str) -> Any:
        """Import the command."""
        module, _, attribute = self.place.partition(":")
        with end_quietly():
            target = getattr(import_module(module), attribute)
        if isinstance(target, typer.Typer):
            group = typer.main.get_command(target)
            group.name, group.help = name, group.help or self.help
            return group
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(name, **self.options)(target)
        return typer.main.get_command(alone)


_EXTRA = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}

COMMANDS = {
    "solve": LazyCommand("api.cli.jobs:solve", "Answer one question.", _EXTRA),
    "select": LazyCommand(
        "api.studies.select:select", "Rank candidates that were drawn elsewhere: one job for each question of a file."
    ),
    "eval": LazyCommand(
        "api.studies.eval:evaluate_suite",
        "Measure strategies on a suite: accuracy, tokens (verifier included), FLOPs, 95 % intervals, the ceiling "
        "pass@N.",
    ),
    "calibrate": LazyCommand(
        "api.studies.calibrate:calibrate_suite", "Fit the table of the strategy auto for the configured models."
    ),
    "contest": LazyCommand(
        "api.studies.contest:run_contest",
        "Solve a list of problems under shared tokens and a shared time, each with what its answer still gains.",
    ),
    "models": LazyCommand(
        "api.cli.jobs:list_models", "List the models of a running service, with the settings of their jobs."
    ),
    "quantize": LazyCommand(
        "api.studies.quantize:quantize",
        "Write a checkpoint in fewer bits, in a public format that other engines can read.",
    ),
    "demo": LazyCommand(
        "api.studies.demo:demo",
        "Start a service, solve sample problems over REST while showing the search, and print a table.",
    ),
    "serve": LazyCommand(
        "api.cli.entry.roles:serve",
        "Run the API, a worker and an engine on this machine, with an embedded broker unless one is configured.",
    ),
    "api": LazyCommand("api.cli.entry.roles:api", "Run the HTTP API alone."),
    "worker": LazyCommand(
        "api.cli.entry.roles:worker", "Run a worker alone: it takes jobs from the broker and searches on the engines."
    ),
    "engine": LazyCommand(
        "api.cli.entry.roles:engine", "Run an inference engine alone, with the policy and the verifier."
    ),
    "mcp": LazyCommand(
        "api.cli.mcp:mcp",
        "Serve the tools solve, select, job and cancel to an agent, by the Model Context Protocol on stdin and stdout.",
    ),
    "jobs": LazyCommand("api.cli.jobs:jobs", "Submit, list, show, watch and cancel jobs of a running service."),
    "export": LazyCommand("api.cli.export:export", "Export jobs that have ended, as they are or as training data."),
    "batch": LazyCommand(
        "api.cli.batch:batch",
        "Submit, run, list, show, watch and cancel batches: many problems under one budget, or a file.",
    ),
    "keys": LazyCommand("api.cli.keys:keys", "Make, list and revoke the API keys of a service."),
    "prm": LazyCommand("api.studies.prm:prm", "Make a process reward model, and measure one."),
    "bench": LazyCommand("benchmarks.commands:bench", "Measure the speed on this machine, beside that of others."),
}


class LazyGroup(TyperGroup):
    """The group of all commands, which imports those that are called."""

    lists_only = False

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = COMMANDS[cmd_name]
        return TyperCommand(cmd_name, help=command.help) if self.lists_only else command.load(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.lists_only = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.lists_only = False


app = typer.Typer(
    name="reasoner", cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        print(f"reasoner {version('reasoner')}")
        raise typer.Exit


@app.callback()
def options(
    shows_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reasoner: better answers from the model that you have, by searching longer, within a budget."""


def run() -> None:
    """Run the command of this process, as ``api.cli.main.main`` says."""
    from workers.processes.shutdown import interruptible

    try:
        with interruptible():
            app()
    except Exception as error:
        status = _explain(error)
        if status is None:
            raise
        sys.exit(status)
    finally:
        _forget_interrupted_exec()


def _explain(error: Exception) -> int | None:
    """Print an error of the configuration, the service or a file as one line and return the exit status.

    Return ``None`` for any other error.
    """
    from api.mcp.endpoint import INSTALL as INSTALL_MCP
    from engine.installation import ENGINE_PACKAGES, INSTALL
    from reasoner.client import ServiceError
    from workers.config.types import ConfigError
    from workers.processes.children import StartError

    match error:
        case ConfigError():
            text, status = str(error), 2
        case StartError():
            text, status = str(error), 1
        case ServiceError():
            hint = " (--key, REASONER_API_KEY)" if error.status == 401 else ""
            text, status = f"{error}{hint}", 2 if error.status == 422 else 1
        case OSError() if error.filename is not None:
            text, status = f"{error.filename}: {error.strerror}", 1
        case ModuleNotFoundError(name=str(name)) if name.partition(".")[0] == "benchmarks":
            text, status = "the benchmarks are not installed: run this in a checkout after `pip install -e .`", 1
        case ModuleNotFoundError(name=str(name)) if name.partition(".")[0] in ENGINE_PACKAGES:
            text, status = f"this command needs the package {name.partition('.')[0]!r}: {INSTALL}", 1
        case ModuleNotFoundError(name="mcp"):
            text, status = f"this command needs the package 'mcp': {INSTALL_MCP}", 1
        case _:
            return None
    print(f"reasoner: {text}", file=sys.stderr)
    return status


def _forget_interrupted_exec() -> None:
    """Keep the interpreter from ending by SIGINT, although the Ctrl-C was handled and the status is set.

    It does so if the last ``exec`` of a text was interrupted, as dataclasses run one for each class of an import.
    """
    exec("")
