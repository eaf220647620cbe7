"""Settings: their sources, precedence and error messages."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import save_random_model
from tests.engine.gguf.files import write_gguf
from workers.config.settings import Settings, load_settings
from workers.config.types import ConfigError, is_loopback, require_model_folder, served_name


@pytest.fixture(autouse=True)
def _nothing_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("REASONER_"):
            monkeypatch.delenv(name)


def test_precedence_is_command_line_then_environment_then_file_then_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reasoner.toml").write_text("port = 1001\nconcurrency = 1002\nbudget_tokens = 1003\n")
    monkeypatch.setenv("REASONER_PORT", "2001")
    monkeypatch.setenv("REASONER_CONCURRENCY", "1000")
    settings = load_settings(port=3001)
    assert (settings.port, settings.concurrency, settings.budget_tokens, settings.max_attempts) == (3001, 1000, 1003, 3)


def test_settings_survive_a_round_trip_through_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(
        redis_url="unix:///x.sock", prm="", api_keys="a" * 20 + ", " + "b" * 20, lease_seconds=2.5, data_dir="here"
    )
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir("/")
    assert load_settings().model_dump() == settings.model_dump()
    assert settings.data_dir == tmp_path / "here"


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("REASONER_PORT", "http", "integer"),
        ("REASONER_PORT", "0", "greater than or equal to 1"),
        ("REASONER_REDIS_URL", "localhost:6379", "redis://"),
        ("REASONER_ENGINE_URL", "localhost:8100", "http://"),
        ("REASONER_ENGINE_URL", "http://127.0.0.1:99999", "Port out of range"),
        ("REASONER_ENGINE_URL", "http://[::1", "IPv6"),
        ("REASONER_BUDGET_TOKENS", "0", "greater than or equal to 1"),
        ("REASONER_API_KEYS", "short", "at least 16 characters"),
    ],
)
def test_an_invalid_variable_is_named_in_one_line_with_a_valid_value(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, hint: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    message = str(caught.value)
    assert variable in message
    assert hint in message
    assert "\n" not in message
    assert value not in message or variable != "REASONER_API_KEYS"


@pytest.mark.parametrize(
    ("text", "hint"), [("prot = 1", "unknown setting 'prot'"), ("port = ", "reasoner.toml"), ("port = 'x'", "port")]
)
def test_an_invalid_file_is_named(tmp_path: Path, text: str, hint: str) -> None:
    (tmp_path / "reasoner.toml").write_text(text)
    with pytest.raises(ConfigError, match=hint) as caught:
        load_settings()
    assert "reasoner.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "example.org"}, False),
        ({"host": "0.0.0.0", "api_keys": "k" * 20}, True),
    ],
)
def test_other_machines_are_served_only_with_keys(options: dict[str, Any], allowed: bool) -> None:
    settings = load_settings(**options)
    assert is_loopback(settings.host) == (settings.host not in ("0.0.0.0", "example.org"))
    if allowed:
        settings.check_bind(stored_keys=False)
    else:
        with pytest.raises(ConfigError, match="REASONER_API_KEYS"):
            settings.check_bind(stored_keys=False)
    settings.check_bind(stored_keys=True)


def test_keys_are_not_printed() -> None:
    assert "that-is-long" not in repr(load_settings(api_keys="secret-key-that-is-long"))


def test_a_model_is_bundled_or_a_folder_or_a_named_folder(tmp_path: Path) -> None:
    folder = tmp_path / "qwen"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert served_name("policy") == "policy"
    assert served_name(str(folder)) == "qwen"
    assert served_name("./qwen/") == "qwen"
    assert served_name(f"me={folder}") == "me"
    assert require_model_folder(str(folder), "model") == require_model_folder(f"me={folder}", "model") == folder
    assert require_model_folder("policy", "model").name == "policy"


def test_a_gguf_file_is_a_model_by_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_random_model("LlamaForCausalLM", {"hidden_size": 96}, tmp_path / "checkpoint")
    file = tmp_path / "small.gguf"
    write_gguf(tmp_path / "checkpoint", file, "llama")
    assert served_name(str(file)) == "small"
    folder = require_model_folder(f"me={file}", "model")
    assert (folder / "config.json").is_file()
    assert (folder / "tokenizer.json").is_file()
    assert require_model_folder(str(file), "model") == folder
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="it is truncated"):
        require_model_folder(str(file), "model")


@pytest.mark.parametrize("value", ["nowhere", "empty", "x=empty", "/nowhere/at/all"])
def test_a_folder_without_a_model_raises_an_error_that_describes_valid_ones(tmp_path: Path, value: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"model: .*config\.json") as caught:
        require_model_folder(value, "model")
    assert "policy" in str(caught.value)


def test_settings_cannot_change_under_a_running_service() -> None:
    settings: Settings = load_settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]


TABLES = """
[models.policy.prices]
prompt = 0.1
generated = 0.5

[effort.low]
tokens = 77
strategy = "greedy"

[effort.huge]
seconds = 10
strategy = {name = "beam", n = 4}
"""


def test_prices_and_efforts_are_tables_and_built_in_efforts_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reasoner.toml").write_text(TABLES)
    settings = load_settings()
    assert (settings.prices["policy"].prompt, settings.prices["policy"].generated) == (0.1, 0.5)
    assert list(settings.effort) == ["minimal", "low", "medium", "high", "xhigh", "max", "none", "huge"]
    assert (settings.effort["low"].tokens, settings.effort["huge"].seconds) == (77, 10.0)


def test_a_role_gets_the_given_settings_and_reads_the_rest_itself(tmp_path: Path) -> None:
    (tmp_path / "reasoner.toml").write_text(TABLES + "\n[models.policy]\nstrategy = 'greedy'\n")
    settings = load_settings(port=1234, queues="batch").model_copy(update={"engine_url": ("http://a", "unix:///b")})
    assert settings.environment() == {
        "REASONER_PORT": "1234",
        "REASONER_QUEUES": "batch",
        "REASONER_ENGINE_URL": "http://a,unix:///b",
    }


def test_tables_may_be_given_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "effort": {"huge": {"seconds": 10, "strategy": "greedy"}},
        "models": {
            "policy": {"sampling": {"top_k": 3}, "budget": {"effort": "huge"}, "strategy": {"name": "beam"}},
            "prm": {"prices": {"prompt": 1}},
        },
        "pools": {"batch": 3},
    }
    settings = load_settings(**given)
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    read = load_settings()
    assert read.model_dump() == settings.model_dump()
    assert read.models["policy"].sampling.model_fields_set == {"top_k"}


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("REASONER_QUEUES", "batch,fast", "Input should be 'interactive', 'webhooks' or 'batch'"),
        ("REASONER_QUEUES", "", "at least 1 item"),
        (
            "REASONER_NAMES",
            "{heavy: policy}",
            "REASONER_NAMES: it is a table, so give a JSON object (Expecting property",
        ),
        ("REASONER_ENGINES", "http://a", "REASONER_ENGINES: it is a table, so give a JSON object (Expecting value"),
        ("REASONER_POOLS", '{"batch": 0}', "REASONER_POOLS.batch: Input should be greater"),
        (
            "REASONER_MODELS",
            '{"m": {"sampling": {"t": 1}}}',
            "'t'; known settings: frequency_penalty, kv_budget, max_tokens",
        ),
        ("REASONER_MODELS", '{"m": {"smapling": {}}}', "REASONER_MODELS.m.smapling: unknown setting 'smapling'"),
        ("REASONER_MODELS", '{"m": {"strategy": "clever"}}', "REASONER_MODELS.m.strategy: "),
        (
            "REASONER_EFFORT",
            '{"low": {"tokenz": 3}}',
            "REASONER_EFFORT.low.tokenz: unknown setting 'tokenz'; known settings:",
        ),
        ("REASONER_EFFORT", '{"low": {"tokens": 0}}', "REASONER_EFFORT.low.tokens: Input should be greater"),
        ("REASONER_EFFORT", '{"low": {}}', "REASONER_EFFORT.low: give at least one of"),
        ("REASONER_MODELS", '{"a": {"prices": {"prompt": -1}}}', "REASONER_MODELS.a.prices.prompt: Input should be"),
        ("REASONER_MODELS", '{"a": {"prices": {"output": 1}}}', "known settings: cached, generated, prompt, verifier"),
    ],
)
def test_an_invalid_entry_of_a_table_is_named_with_its_key(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, hint: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("model", "prm", "name"),
    [
        ("policy", None, "prm"),
        ("policy-large", None, "prm"),
        ("policy", "none", None),
        ("qwen", None, None),
        ("qwen=/models/qwen", None, None),
        ("qwen", "prm", "prm"),
        ("qwen", "mine=/models/prm", "mine"),
    ],
)
def test_the_bundled_verifier_is_the_default_for_bundled_policies_only(
    model: str, prm: str | None, name: str | None
) -> None:
    assert load_settings(model=model, prm=prm).prm_name == name


def test_a_copy_of_a_bundled_policy_has_no_default_verifier(tmp_path: Path) -> None:
    copy = shutil.copytree(require_model_folder("policy", "model"), tmp_path / "policy-2")
    assert load_settings(model=str(copy)).prm_name is None


def test_none_survives_a_round_trip_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in load_settings(prm="none").environment().items():
        monkeypatch.setenv(name, value)
    assert load_settings().prm_name is None


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("prm_url = ['http://127.0.0.1:9']", "reasoner.toml: prm_url: no verifier is configured"),
        ("prm_format = 'rlhflow'", "reasoner.toml: prm_format: no verifier is configured"),
        (
            "[effort.most]\ntokens = 9\nstrategy = 'beam'",
            "reasoner.toml: effort.most.strategy: 'beam' needs a verifier",
        ),
        ("[models.policy]\nstrategy = 'best_of_n'", "models.policy.strategy: 'best_of_n' needs a verifier"),
    ],
)
def test_settings_that_require_a_verifier_are_refused_without_one(tmp_path: Path, text: str, where: str) -> None:
    (tmp_path / "reasoner.toml").write_text(f"prm = 'none'\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert where in str(caught.value)
    assert "REASONER_PRM" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[names.a]\nmodel = 'b'\n[names.b]\nmodel = 'a'", "names.a: 'a' stands for itself (a -> b -> a)"),
        ("[names.policy]\nmodel = 'prm'", "names.policy: 'policy' is a served model: give the name another word"),
        ("[names.a]\nmodel = 'policy'\neffort = 'extreme'", "names.a.effort: there is no effort 'extreme'; known are"),
        ("[names.a]\nmodel = 'policy'\n[names.a]\nmodel = 'prm'", "Cannot declare"),
        ("[names.a]\nmodels = [{model = 'policy'}, {model = 'b'}]\n[names.b]\nmodel = 'policy'\neffort = 'low'", "'b'"),
        ("[names.a]\nmodel = 'policy'\nfixed = ['answer']", "names.a.fixed: the name does not give 'answer'"),
        ("[names.' ']\nmodel = 'policy'", "names: ' ' is no name: give it a word"),
        ("model = 'policy'\n[names.prm]\nmodel = 'policy'", "names.prm: 'prm' is a served model"),
        ("[names.a]\nmodel = 'policy'\nfixed = ['colour']", "names.a.fixed.0: "),
        ("[names.a]\nstrategy = 'greedy'", "names.a: give either 'model', what the name stands for, or 'models'"),
        ("[names.a]\nmodel = 'policy'\nbudgets = 3", "names.a.budgets: "),
    ],
)
def test_faults_of_names_are_found_when_the_file_is_read(
    text: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reasoner.toml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(fault)):
        load_settings()
