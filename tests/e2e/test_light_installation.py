"""``pip install reasoner`` alone serves in front of other engines; what needs the engine says so in one line."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from engine.installation import ENGINE_PACKAGES
from tests.e2e.openai_mock import KEY, MODEL, HostedChat
from tests.light import ROOT, make_light_environment
from tests.listening import listening
from tests.long import mostly_long

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("light")
    return make_light_environment(folder) | {"REASONER_DATA_DIR": str(folder / "data")}


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Path]:
    """A folder whose ``reasoner.toml`` names a hosted model."""
    (tmp_path / "key").write_text(KEY)
    with listening(HostedChat(refusals=0, cuts=0).app, tmp_path / "s") as url:
        (tmp_path / "reasoner.toml").write_text(
            f'model = "{MODEL}"\nprm = "none"\n[engines.openai]\nurl = "{url}"\nkind = "chat"\nmodels = ["{MODEL}"]\n'
            f'api_key_file = "{tmp_path / "key"}"\n'
        )
        yield tmp_path


def run(environment: dict[str, str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "api.cli.main", *arguments]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )


def test_the_extra_has_the_packages_that_are_looked_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {Requirement(text).name for text in extras["engine"]} == set(ENGINE_PACKAGES)


def test_the_environment_lacks_what_the_engine_needs(environment: dict[str, str]) -> None:
    probe = f"from importlib.util import find_spec; print([find_spec(name) for name in {ENGINE_PACKAGES!r}])"
    done = subprocess.run(
        [sys.executable, "-c", probe], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == str([None] * len(ENGINE_PACKAGES))


def test_the_command_for_agents_says_which_extra_it_needs(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(environment, tmp_path, "mcp")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["reasoner: this command needs the package 'mcp': pip install 'reasoner[mcp]'"]


@pytest.mark.parametrize("strategy", mostly_long(["self_consistency", "revise", "aggregate"], every=3))
def test_a_question_is_answered_by_a_hosted_model(strategy: str, environment: dict[str, str], hosted: Path) -> None:
    done = run(environment, hosted, "solve", "2 + 2?", "--strategy", strategy, "--n", "3")
    assert done.returncode == 0, done.stderr
    assert "4" in done.stdout


@pytest.mark.parametrize(
    "command",
    mostly_long(
        ["serve", "engine", "solve 2+2?", "quantize policy OUT", "prm train data OUT", "demo", "bench engine"], every=2
    ),
)
def test_a_command_that_needs_the_engine_says_so_in_its_last_line(
    command: str, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "data").touch()
    done = run(environment, tmp_path, *command.split())
    assert done.returncode in (1, 2)
    assert "pip install 'reasoner[engine]'" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
