"""``reasoner models --check`` on engines of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from api.cli.entry.app import app
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from tests.engine.remote.mock_vllm import MockVllm
from tests.listening import listening

# Run alone after a change of a kernel, the engine's fixture compiles all kernels: two minutes on a busy machine.
pytestmark = pytest.mark.timeout(400)

POLICY = Path(__file__).parents[3] / "reasoner" / "bundled" / "policy"
KEY = "a-secret-of-the-tests"


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine({"policy": POLICY}, EngineOptions(kv_tokens=4096, draft="off"))


@pytest.fixture(autouse=True)
def _own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEY", KEY)


def configure(folder: Path, **tables: str) -> None:
    lines = [f"[engines.{name}]\n{fields}\n" for name, fields in tables.items()]
    (folder / "reasoner.toml").write_text('model = "policy"\nprm = "none"\n' + "".join(lines))


def check(*options: str) -> Result:
    return CliRunner().invoke(app, ["models", "--check", *options])


def test_an_honest_engine_passes_with_its_version_and_flags(engine: LocalEngine, tmp_path: Path) -> None:
    with listening(MockVllm(engine, "policy", key=KEY).app, tmp_path / "s") as url:
        configure(tmp_path, gpu=f'url = "{url}"\nmodels = "policy"\napi_key_env = "KEY"')
        result = check()
    assert result.exit_code == 0, result.output
    [line] = result.output.splitlines()
    assert line.startswith(f"policy at {url} (vllm 0.32.0, max_model_len 256): reads what it writes")


def test_an_engine_that_writes_something_else_fails_the_check_in_one_line(engine: LocalEngine, tmp_path: Path) -> None:
    honest, lying = MockVllm(engine, "policy"), MockVllm(engine, "policy", 4, version="0.32.1")
    with listening(honest.app, tmp_path / "a") as one, listening(lying.app, tmp_path / "b") as other:
        configure(tmp_path, gpus=f'url = ["{one}", "{other}"]\nmodels = "policy"')
        result, documents = check(), json.loads(check("--json").output)["data"]
    assert result.exit_code == 1
    first, second = result.output.splitlines()
    assert "reads what it writes" in first
    assert f"policy at {other} (vllm 0.32.1, max_model_len 256): computes something else" in second
    assert [one["verdict"] for one in documents] == ["consistent", "differs"]


def test_a_server_is_described_by_names_and_numbers_alone(engine: LocalEngine, tmp_path: Path) -> None:
    entry = {
        "max_model_len": 256,
        "architecture": "Qwen3ForCausalLM",
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}" * 2,
        "stop": "\n",
        "counts_exactly": True,
        "bos": None,
    }
    with listening(MockVllm(engine, "policy", entry=entry).app, tmp_path / "s") as url:
        configure(tmp_path, gpu=f'url = "{url}"\nmodels = "policy"')
        result = check()
    assert result.exit_code == 0, result.output
    [line] = result.output.splitlines()
    assert "(vllm 0.32.0, max_model_len 256, architecture Qwen3ForCausalLM): reads what it writes" in line


def test_what_cannot_be_compared_is_said_and_is_no_failure(engine: LocalEngine, tmp_path: Path) -> None:
    with listening(MockVllm(engine, "policy", form="none").app, tmp_path / "s") as url:
        tables = {
            "plain": f'url = "{url}"\nmodels = "policy"\ntokenizer = "{POLICY}"',
            "hosted": 'url = "http://127.0.0.1:9"\nmodels = "gpt"\nkind = "chat"',
        }
        configure(tmp_path, **tables)
        result = check()
    assert result.exit_code == 0, result.output
    first, second = result.output.splitlines()
    assert "cannot be checked: the server reports no log-probabilities" in first
    assert second == "gpt at http://127.0.0.1:9 (chat): a chat server reports no log-probabilities of a prompt"


def test_an_engine_that_is_away_fails_the_check_and_the_next_is_checked(engine: LocalEngine, tmp_path: Path) -> None:
    with listening(MockVllm(engine, "policy").app, tmp_path / "s") as url:
        configure(
            tmp_path, gone=f'url = "unix://{tmp_path}/gone"\nmodels = "policy"', here=f'url = "{url}"\nmodels = "other"'
        )
        result = check()
    assert result.exit_code == 1
    first, second = result.output.splitlines()
    assert "cannot be asked" in first
    assert "serves no model 'other'" in second


def test_without_an_engine_of_others_there_is_nothing_to_check() -> None:
    result = check()
    assert result.exit_code == 0, result.output
    assert "No engine of others is configured" in result.output
