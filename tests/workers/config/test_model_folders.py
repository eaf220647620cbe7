"""Models with which every job would fail are refused before any role starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from api.roles.serve import run_engine
from api.roles.supervisor import Supervisor, free_port
from engine.remote.local_tokenizer import LocalTokenizer
from engine.text.tokenizer import Tokenizer
from tests.long import mostly_long
from tests.prm.checkpoints import FORMATS, save_checkpoint
from workers.config.model_folders import check_models
from workers.config.settings import load_settings
from workers.config.types import ConfigError, require_model_folder


def copy_of(name: str, folder: Path) -> Path:
    """Return a copy of a bundled model in a user's folder."""
    return shutil.copytree(require_model_folder(name, "model"), folder)


def edit(file: Path, **changes: Any) -> None:
    """Change fields of a JSON file; ``None`` removes one."""
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return copy_of("policy", tmp_path / "my-policy")


@pytest.fixture
def prm(tmp_path: Path) -> Path:
    return copy_of("prm", tmp_path / "my-prm")


def test_bundled_models_and_copies_of_them_are_accepted(policy: Path, prm: Path) -> None:
    check_models(load_settings())
    check_models(load_settings(model="policy-large", prm="none"))
    check_models(load_settings(model=str(policy)))
    check_models(load_settings(model=f"mine={policy}", prm=f"judge={prm}"))


def test_models_on_other_machines_are_not_checked() -> None:
    check_models(load_settings(engine_url="http://gpu:8100", model="qwen", prm="/not/here/prm"))


def test_a_policy_without_a_chat_template_is_refused(policy: Path) -> None:
    edit(policy / "tokenizer_config.json", chat_template=None)
    for settings in (
        load_settings(model=str(policy)),
        load_settings(engine_url="http://gpu:8100", model="mine", engine_tokenizer=str(policy)),
    ):
        with pytest.raises(ConfigError, match=r"(model|engine_tokenizer): .*my-policy has no chat template.*jinja"):
            check_models(settings)


def test_a_chat_template_may_be_a_file_or_one_of_several(policy: Path) -> None:
    config = policy / "tokenizer_config.json"
    template = json.loads(config.read_text())["chat_template"]
    named = [{"name": "tools", "template": "?"}, {"name": "default", "template": template}]
    edit(config, chat_template=named)
    check_models(load_settings(model=str(policy)))
    edit(config, chat_template=named[:1])
    with pytest.raises(ConfigError, match="no chat template"):
        check_models(load_settings(model=str(policy)))
    (policy / "chat_template.jinja").write_text(template)
    check_models(load_settings(model=str(policy)))


def test_a_prm_without_its_settings_is_refused(prm: Path) -> None:
    edit(prm / "config.json", reasoner_prm=None)
    with pytest.raises(ConfigError, match=r"prm: model 'my-prm' is not known to be .*token_class.*REASONER_PRM_FORMAT"):
        check_models(load_settings(prm=str(prm)))
    with pytest.raises(ConfigError, match=r"prm: .*config.json needs 'separator' in 'reasoner_prm'"):
        check_models(load_settings(prm=str(prm), prm_format="token_classification"))
    with pytest.raises(ConfigError, match=r"prm_tokenizer: model 'far' is not known"):
        check_models(load_settings(prm="far", prm_url="http://gpu:8100", prm_tokenizer=str(prm)))


def test_a_causal_model_is_not_accepted_as_prm_unless_a_format_is_named(policy: Path) -> None:
    with pytest.raises(ConfigError, match="prm: model 'my-policy' is not known to be a process reward model"):
        check_models(load_settings(prm=str(policy)))
    with pytest.raises(ConfigError, match="is for a model that classifies tokens"):
        check_models(load_settings(prm=str(policy), prm_format="qwen_math"))


def test_a_prm_whose_separator_is_two_tokens_is_refused(prm: Path) -> None:
    notes = json.loads((prm / "config.json").read_text())["reasoner_prm"]
    edit(prm / "config.json", reasoner_prm=notes | {"separator": "\n\n7"})
    with pytest.raises(ConfigError, match=r"separator '\\n\\n7' is not a token .* which cuts it into 2"):
        check_models(load_settings(prm=str(prm)))


def test_a_prm_without_a_chat_template_is_refused_if_its_format_requires_one(prm: Path) -> None:
    edit(prm / "tokenizer_config.json", chat_template=None)
    with pytest.raises(ConfigError, match=r"prm: .*my-prm has no chat template"):
        check_models(load_settings(prm=str(prm)))


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_every_public_kind_of_prm_is_accepted_with_the_bos_token_of_the_engine(kind: str, tmp_path: Path) -> None:
    folder = save_checkpoint(kind, tmp_path / kind)
    check_models(load_settings(prm=str(folder)))
    assert LocalTokenizer(folder).bos == Tokenizer(folder, 700).bos


def test_an_outcome_reward_model_is_not_accepted_as_prm(tmp_path: Path) -> None:
    folder = save_checkpoint("outcome", tmp_path / "outcome")
    with pytest.raises(ConfigError, match=r"scores finished solutions, not steps.*'outcome'"):
        check_models(load_settings(prm=str(folder)))


@pytest.mark.parametrize("role", mostly_long(["serve", "engine", "api", "worker", "solve", "eval"], every=3))
def test_every_command_that_resolves_models_refuses_invalid_ones_in_one_line(
    role: str, policy: Path, tmp_path: Path
) -> None:
    edit(policy / "tokenizer_config.json", chat_template=None)
    arguments = {"solve": ["solve", "1 + 1?"], "eval": ["eval", "words", "--strategy", "greedy", "--limit", "1"]}
    run = subprocess.run(
        [sys.executable, "-m", "api.cli.main", *arguments.get(role, [role])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "REASONER_MODEL": str(policy),
            "REASONER_PORT": str(free_port()),
            "REASONER_DATA_DIR": str(tmp_path / "data"),
        },
    )
    assert run.returncode == 2, run.stderr
    assert "my-policy has no chat template" in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "data").exists()


def test_nothing_is_started_with_an_invalid_model(prm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(prm / "config.json", reasoner_prm=None)
    settings = load_settings(prm=str(prm), data_dir=tmp_path / "data", port=free_port())
    with pytest.raises(ConfigError, match="prm"), Supervisor(settings, log_dir=tmp_path / "logs"):
        pass
    assert not (tmp_path / "data").exists()
    monkeypatch.setattr("api.roles.serve.os.execv", lambda *_: pytest.fail("it was started"))
    with pytest.raises(ConfigError, match="prm"):
        run_engine(settings)
