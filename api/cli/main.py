"""The entry point of the command line.

Nothing is imported before Ctrl-C is quiet, and the modules of a command only when it is called (``api.cli.entry.app``).
"""

from __future__ import annotations

import os
import sys
from typing import Any

from workers.processes.quiet_imports import end_quietly

GYM_PREFIX = "reasoning-gym:"


def main() -> None:
    """Entry point. Errors of the configuration, the service and files become one line, without a traceback.

    Ctrl-C ends every command with status 130: no command swallows it.
    """
    _fix_hash_order()
    with end_quietly():
        from api.cli.entry.app import run
    run()


def _fix_hash_order() -> None:
    """Start this process again with fixed hashes, if it is to make problems of reasoning-gym.

    Some of its tasks draw from sets of texts, so that every process would have other problems for the same seed.
    """
    if sys.flags.hash_randomization and any(argument.startswith(GYM_PREFIX) for argument in sys.argv):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})


def __getattr__(name: str) -> Any:
    """Return the typer application for programs that embed the commands."""
    if name != "app":
        raise AttributeError(name)
    from api.cli.entry.app import app

    return app


if __name__ == "__main__":
    main()
