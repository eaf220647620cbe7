"""The command line's help, and options that are passed to the roles."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from api.cli import main
from api.cli.entry.app import COMMANDS as LAZY
from api.cli.entry.app import app
from api.roles import serve as roles
from docs.generate.command_line import list_children
from reasoner.evaluation.suites.gym import PREFIX
from workers.config.settings import Settings
from workers.config.types import ConfigError


def commands(command: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return every command and group by its words."""
    found = {path: command}
    for name, part in list_children(command).items():
        found |= commands(part, (*path, name))
    return found


COMMANDS = commands(typer.main.get_command(app))


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"reasoner {version('reasoner')}\n"


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "reasoner")
def test_every_command_has_plain_help_without_docstring_markup(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "``" not in result.stdout
    command = COMMANDS[path]
    assert command.help
    for parameter in command.params:
        assert "``" not in (getattr(parameter, "help", None) or "")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    found: list[Settings] = []
    monkeypatch.setattr(roles, "serve", found.append)
    return found


def test_serve_passes_engine_options_to_its_engine(started: list[Settings]) -> None:
    words = ["serve", "--device", "cpu", "--threads", "3", "--draft", "off", "--kv-dtype", "int8"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    [settings] = started
    assert (settings.engine_device, settings.engine_threads) == ("cpu", 3)
    assert (settings.draft, settings.engine_kv_dtype) == ("off", "int8")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "tpu"], "--device"),
        (["--threads", "0"], "--threads"),
        (["--kv-dtype", "int3"], "--kv-dtype"),
    ],
)
def test_serve_refuses_an_invalid_engine_option_by_its_name(
    started: list[Settings], words: list[str], told: str
) -> None:
    result = CliRunner().invoke(app, ["serve", *words])
    assert isinstance(result.exception, ConfigError)
    assert told in str(result.exception)
    assert not started


def test_serve_refuses_engine_options_if_the_engine_is_configured_elsewhere(
    started: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REASONER_ENGINE_URL", "http://127.0.0.1:9")
    result = CliRunner().invoke(app, ["serve", "--threads", "2", "--kv-dtype", "int8"])
    assert isinstance(result.exception, ConfigError)
    assert "--threads, --kv-dtype: the engines are configured elsewhere" in str(result.exception)
    assert not started
    assert CliRunner().invoke(app, ["serve"]).exit_code == 0


def test_every_process_makes_the_same_problems_of_a_task_that_draws_from_a_set_of_texts(tmp_path: Path) -> None:
    package = tmp_path / "reasoning_gym"
    package.mkdir()
    (package / "__init__.py").write_text(
        "def create_dataset(task, **params):\n    raise ValueError(list({str(number) for number in range(20)}))\n"
    )
    factory = "import dataclasses\nDATASETS = {'letters': (None, dataclasses.make_dataclass('Config', []))}\n"
    (package / "factory.py").write_text(factory)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": "random"}
    command = [Path(sys.executable).with_name("reasoner"), "eval", "reasoning-gym:letters"]
    orders = {
        subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60).stderr
        for _ in range(3)
    }
    assert len(orders) == 1
    assert "reasoning-gym:letters cannot be made" in "".join(orders)


def test_ctrl_c_in_the_middle_of_an_import_ends_with_status_130(tmp_path: Path) -> None:
    """An import runs texts by ``exec``; the interpreter would later end by SIGINT if one of them was interrupted."""
    (tmp_path / "interrupted.py").write_text(
        "import typer\nfrom api.cli import main\nfrom api.cli.entry import app\napp.app = typer.Typer()\n"
        "@app.app.command()\ndef importing():\n    exec('raise KeyboardInterrupt')\nmain.main()\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"}
    ended = subprocess.run(
        [sys.executable, "-m", "interrupted"], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stderr.count("Traceback")) == (130, 0)


def test_help_imports_no_command() -> None:
    """Each of these takes a part of a second, and the help needs none of them."""
    code = "import sys\nfrom api.cli.main import main\ntry:\n    main()\nfinally:\n    print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    heavy = {"pydantic", "httpx", "fastapi", "celery", "redis", "numpy", "torch", "opentelemetry"}
    assert loaded & (heavy | {"reasoner", "workers.config.settings", "api.cli.jobs", "api.roles"}) == set()
    assert all(name in done.stdout for name in LAZY)


@pytest.mark.parametrize("name", LAZY)
def test_the_list_of_commands_has_the_first_sentence_of_each_help(name: str) -> None:
    text = " ".join(COMMANDS[name,].help.split("\n\n")[0].split())
    assert text.split(". ")[0].rstrip(".") + "." == LAZY[name].help


def test_an_unknown_command_is_named() -> None:
    result = CliRunner().invoke(app, ["slove"])
    assert result.exit_code == 2
    assert "slove" in result.output


@pytest.mark.parametrize("module", ["api.cli.entry.app", "typer", "api.cli.render", "httpx", "reasoner.jobs.spec"])
def test_ctrl_c_while_modules_are_imported_is_quiet(module: str, tmp_path: Path) -> None:
    """The process interrupts itself at the import of a module, however long after its start that is."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "def interrupt(event, arguments):\n"
        f"    if event == 'import' and arguments[0] == {module!r}:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.addaudithook(interrupt)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"}
    command = [sys.executable, "-m", "api.cli.main", "jobs", "list"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_the_prefix_of_problems_that_need_fixed_hashes_is_that_of_the_suite() -> None:
    assert main.GYM_PREFIX == PREFIX
