"""Output of all commands: consoles, progress bars, JSON documents, and errors that end a command."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

CHANCE_AUC = 0.6
"""AUC below which a comment says that it is near chance."""
WIDTH = 140
"""Characters of a line in a file or a pipe."""


def result_console() -> Console:
    """Return the console for results on stdout; in a file or a pipe tables keep their full width."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def count_progress(console: Console, *, transient: bool = False, shows_remaining: bool = False) -> Progress:
    """Return a progress bar with the number of completed items and the elapsed time."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    if shows_remaining:
        columns.append(TimeRemainingColumn())
    return Progress(*columns, console=console, transient=transient)


def print_json(document: Any) -> None:
    """Print the one JSON document of a command with ``--json``."""
    print(json.dumps(document, indent=2))


@contextlib.contextmanager
def exit_on_error(console: Console, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into a line on the console and exit status 1."""
    try:
        yield
    except kinds as error:
        console.print(f"reasoner: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def describe_auc(auc: float | None, within: float | None) -> str | None:
    """Return a comment on an AUC that is missing or near 0.5, which is chance."""
    if auc is None:
        return "There is no AUC: all held-out steps are good, or all are bad. Take harder or easier problems, or more."
    if auc < CHANCE_AUC:
        return (
            f"The AUC of {auc:.3f} is near 0.5: the scores tell good steps from bad ones hardly better than chance. "
            "Use more solutions, more epochs or a higher --rate, or a larger base; a search with it beats no vote."
        )
    if within is not None and within < CHANCE_AUC:
        return (
            f"Within a question the AUC of {within:.3f} is near 0.5: the scores tell hard questions from easy ones, "
            "not the better of two solutions. Take more solutions of each question."
        )
    return None
