"""Models that bring their settings: places, defaults of jobs, verifiers, and files beside the weights."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from api.roles.supervisor import engine_command
from engine.protocol.types import Capability, ModelInfo
from engine.remote.chat.options import ChatOptions
from engine.remote.router import RoutedEngine
from reasoner.admission.refusal import JobRefused
from reasoner.admission.resolve import describe_defaults, resolve_job
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.verifier_specs import JudgeVerifier, PrmVerifier
from tests.docs.blocks import ROOT, blocks
from workers.config.model_folders import check_models
from workers.config.model_profiles import MODEL_FILE
from workers.config.settings import Settings, load_settings
from workers.config.types import ConfigError, require_model_folder
from workers.engines.connect import connect


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def configure(folder: Path, text: str, **overrides: str) -> Settings:
    """Return the settings of a file."""
    (folder / "reasoner.toml").write_text(text)
    return load_settings(**overrides)


def loaded(settings: Settings) -> list[str]:
    """Return the names of the models that an engine of this machine loads."""
    command = engine_command(settings, [])
    return [command[index + 1].partition("=")[0] for index, word in enumerate(command) if word == "--model"]


class Catalog:
    def __init__(self, *names: str) -> None:
        self._infos = [ModelInfo(name, "generate", 256, 100, 1000, sampling={"temperature": 0.6}) for name in names]

    async def models(self) -> list[ModelInfo]:
        prm = {"format": "token_classification", "separator": "\n\n", "positive_label": 1}
        return [*self._infos, ModelInfo("prm", "classify", 256, 100, 1000, {"reasoner_prm": prm})]


def test_every_model_with_a_path_is_loaded_and_a_bundled_policy_brings_its_verifier(tmp_path: Path) -> None:
    text = "model = 'big'\n[models.big]\npath = 'policy-large'\nverifier = 'none'\n[models.small]\npath = 'policy'"
    settings = configure(tmp_path, text)
    assert loaded(settings) == ["big", "small", "prm"]
    check_models(settings)
    assert settings.default_verifier("big") is None
    assert settings.default_verifier("small") == PrmVerifier(model="prm")


async def test_models_with_a_url_are_requested_there_and_not_loaded(tmp_path: Path) -> None:
    text = "[models.far]\nurl = 'http://127.0.0.1:9'\n[models.near]\npath = 'policy-large'\n"
    settings = configure(tmp_path, text)
    assert loaded(settings) == ["policy", "prm", "near"]
    engine = connect(settings)
    assert isinstance(engine, RoutedEngine)
    assert list(engine._overrides) == ["far"]
    await engine.close()


def test_nothing_is_loaded_if_all_models_have_servers(tmp_path: Path) -> None:
    settings = configure(tmp_path, "model = 'far'\n[models.far]\nurl = ['http://a:1', 'http://b:1']\n")
    assert not settings.has_local_engine
    assert settings.engine_addresses == ()
    engine = connect(settings)
    assert isinstance(engine, RoutedEngine)
    assert engine._all == [engine._engine_for("far")]


def test_each_model_has_the_verifier_that_it_names(tmp_path: Path) -> None:
    text = (
        "[models.a]\npath = 'policy-large'\nverifier = 'other'\n"
        "[models.b]\npath = 'policy-large'\nverifier = { kind = 'judge' }\n"
        "[models.c]\npath = 'draft'\n"
        "[models.other]\npath = 'prm'\n"
    )
    settings = configure(tmp_path, text)
    assert settings.default_verifier("a") == PrmVerifier(model="other")
    assert settings.default_verifier("b") == JudgeVerifier(kind="judge")
    assert settings.default_verifier("policy") == PrmVerifier(model="prm")
    check_models(settings)
    given = configure(tmp_path, text, prm="none")
    assert given.default_verifier("policy") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[models.a]\nsistem = 'x'",
            "models.a.sistem: unknown setting 'sistem'; known settings: adapter, answer, api_key_env, api_key_file",
        ),
        ("[models.a]\npath = 'policy'\nurl = 'http://a:1'", "models.a: give either 'path', for our engine, or 'url'"),
        ("[models.a]\npath = '/not/here'", "models.a.path: '/not/here' is neither a bundled model"),
        ("[models.a]\nprompt = 'Think.'", "models.a.prompt: a prompt is a template: write {problem} where"),
        ("[models.a]\nverifier = 'qwen-prm'", "models.a.verifier: model 'qwen-prm' is not served; served are policy"),
        ("[models.a]\nverifier = { kind = 'jugde' }", "models.a.verifier: unknown kind of verifier; use one of prm"),
        ("[models.a]\nsampling = { temprature = 1 }", "models.a.sampling.temprature: unknown setting 'temprature'"),
        ("[models.a]\nmax_tokens = 9\nsampling = { max_tokens = 8 }", "models.a: give either 'max_tokens' or"),
        ("[models.a]\nurl = 'a:1'", "models.a.url: must start with one of http://, https://, unix://"),
        ("[models.a]\npath = 'policy'\ntokenizer = 'x'", "'tokenizer' belongs to a model with 'url'"),
        ("[models.a]\nstop = 'x'", "models.a.stop: Input should be a valid list"),
        ("model = 'a=policy'\n[models.a]\npath = 'policy'", "has a place in [models.a] too: leave out one"),
        ("[prices.policy]\nprompt = 1", "prices: the prices of a model belong to it: write [models.NAME.prices]"),
    ],
)
def test_an_invalid_model_is_refused_in_one_line_with_a_correction(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        engine_command(configure(tmp_path, text), [])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_old_variable_of_prices_is_refused_instead_of_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REASONER_PRICES", "{}")
    with pytest.raises(ConfigError, match=r"REASONER_PRICES: .* \[models.NAME.prices\] into reasoner.toml"):
        load_settings()


def test_a_file_beside_the_weights_brings_settings_below_those_of_the_service(tmp_path: Path) -> None:
    folder = shutil.copytree(require_model_folder("policy", "model"), tmp_path / "mine")
    (folder / MODEL_FILE).write_text("system = 'Be brief.'\nmax_tokens = 9\n[sampling]\ntop_p = 0.9\ntop_k = 5\n")
    profile = configure(tmp_path, "", model=str(folder)).models["mine"]
    assert (profile.system, profile.max_tokens, profile.sampling.top_p) == ("Be brief.", 9, 0.9)
    text = f"[models.named]\npath = '{folder}'\nsystem = 'Be long.'\nsampling = {{ top_k = 7 }}\n"
    profile = configure(tmp_path, text).models["named"]
    assert (profile.system, profile.max_tokens) == ("Be long.", 9)
    assert (profile.sampling.top_p, profile.sampling.top_k) == (0.9, 7)


def test_a_gguf_files_settings_are_in_a_file_of_its_name(tmp_path: Path) -> None:
    weights = tmp_path / "small.Q4_1.gguf"
    weights.touch()
    weights.with_name("small.Q4_1.gguf.toml").write_text("stop = ['Question:']")
    assert load_settings(model=str(weights)).models["small.Q4_1"].stop == ["Question:"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sistem = 'x'", "unknown setting 'sistem'; known settings: answer, budget, chat_template, "),
        ("path = 'x'", "unknown setting 'path'"),
        ("prompt = 'Think.'", "prompt: a prompt is a template"),
        ("prompt", "Expected '=' after a key"),
    ],
)
def test_an_invalid_file_beside_the_weights_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / MODEL_FILE).write_text(text)
    with pytest.raises(ConfigError, match=rf"mine/{MODEL_FILE}: ") as refused:
        load_settings(model=str(tmp_path / "mine"))
    assert message in str(refused.value)


MODEL = """
model = "a"
[models.a]
path = "policy-large"
system = "Be brief."
prompt = "Solve: {problem}"
stop = ["Question:"]
max_tokens = 40
chat_template_kwargs = { enable_thinking = false, style = "x" }
verifier = { kind = "judge" }
answer = "choice"
[models.b]
path = "policy"
"""


async def test_a_job_gets_the_settings_of_its_model_and_overrides_any_of_them(tmp_path: Path) -> None:
    settings, catalog = configure(tmp_path, MODEL), Catalog("a", "b")
    job = await resolve_job(JobRequest(problem="1 + 1?"), settings, catalog)
    assert job.to_messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Solve: 1 + 1?"},
    ]
    assert (job.stop, job.sampling.temperature, job.sampling.max_tokens) == (["Question:"], 0.6, 40)
    assert (job.answer.compare, job.verifier) == ("choice", JudgeVerifier(kind="judge", model="a"))
    assert JobSpec.model_validate(job.model_dump()) == job
    own = {"system": None, "prompt": None, "stop": [], "verifier": None, "sampling": {"top_p": 0.5}}
    more = {"answer": {"compare": "text", "instruct": False}, "chat_template_kwargs": {"enable_thinking": True}}
    job = await resolve_job(JobRequest.model_validate({"problem": "1 + 1?", **own, **more}), settings, catalog)
    assert job.to_messages() == [{"role": "user", "content": "1 + 1?"}]
    assert (job.stop, job.answer.compare, job.verifier, job.sampling.top_p) == ([], "text", None, 0.5)
    assert job.chat_template_kwargs == {"enable_thinking": True, "style": "x"}


async def test_a_bundled_policy_beside_other_models_keeps_the_bundled_verifier(tmp_path: Path) -> None:
    settings, catalog = configure(tmp_path, MODEL), Catalog("a", "b")
    job = await resolve_job(JobRequest(problem="1 + 1?", model="b"), settings, catalog)
    assert job.verifier == PrmVerifier(model="prm")
    assert (job.system, job.prompt, job.stop) == (None, "{problem}", [])


async def test_a_system_message_of_the_client_replaces_the_models(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "mine"}, {"role": "user", "content": "?"}]
    job = await resolve_job(JobRequest.model_validate({"messages": turns}), configure(tmp_path, MODEL), Catalog("a"))
    assert [turn["content"] for turn in job.to_messages()] == ["mine", "Solve: ?"]


async def test_the_described_defaults_are_those_of_a_job(tmp_path: Path) -> None:
    settings, catalog = configure(tmp_path, MODEL), Catalog("a", "b")
    for info in (await catalog.models())[:2]:
        described = describe_defaults(info, settings)
        job = (await resolve_job(JobRequest(problem="?", model=info.id), settings, catalog)).model_dump()
        for name in ("system", "prompt", "stop", "chat_template_kwargs", "sampling", "answer"):
            assert described[name] == job[name]
        assert described["strategy"]["name"] == job["strategy"]["name"]
        assert described["verifier"]["kind"] == job["verifier"]["kind"]


def test_the_examples_of_the_documentation_are_valid(tmp_path: Path) -> None:
    page = ROOT / "docs" / "how-to" / "model-settings.md"
    example, base = (block.code for block in blocks(page) if block.language == "toml")
    assert configure(tmp_path, base).models["base"].chat_template == "none"
    settings = configure(tmp_path, example)
    assert set(settings.models) == {"smol", "math-prm", "Qwen/Qwen3-32B"}
    assert settings.models["smol"].prompt == (
        "Solve this problem step by step, and end with \\boxed{answer}.\n\n{problem}"
    )
    assert set(settings.local_models()) == {"smol", "math-prm"}


def test_the_key_of_a_server_comes_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("sk-file\n")
    monkeypatch.setenv("FAR_KEY", "sk-environment")
    text = (
        "[models.far]\nurl = 'http://127.0.0.1:9'\napi_key_env = 'FAR_KEY'\nparameters = 7\n"
        "[models.near]\nurl = 'http://127.0.0.1:8'\napi_key_file = 'key'\n"
    )
    settings = configure(tmp_path, text, engine_api_key="sk-main")
    keys = {name: settings.models[name].read_api_key() for name in ("far", "near")}
    assert {name: key and key.get_secret_value() for name, key in keys.items()} == {
        "far": "sk-environment",
        "near": "sk-file",
    }
    assert "sk-" not in repr(settings)
    assert settings.environment() == {"REASONER_ENGINE_API_KEY": "sk-main"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("api_key_env = 'NOWHERE'", "models.far.api_key_env: the environment has no variable 'NOWHERE'"),
        ("api_key_file = 'absent'", "models.far.api_key_file: absent cannot be read"),
        ("api_key_file = 'two'", "models.far.api_key_file: two must hold the key alone"),
        ("api_key_env = 'A'\napi_key_file = 'two'", "give either 'api_key_env' or 'api_key_file'"),
    ],
)
def test_a_missing_key_of_a_server_is_named(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "two").write_text("sk one")
    with pytest.raises(ConfigError) as caught:
        configure(tmp_path, f"[models.far]\nurl = 'http://127.0.0.1:9'\n{lines}\n")
    assert message in str(caught.value)
    assert "sk" not in str(caught.value)


def test_servers_in_engines_have_their_models_and_nothing_is_loaded_for_them(tmp_path: Path) -> None:
    text = (
        "model = 'gpt'\n[engines.hosted]\nurl = 'https://api.example/v1'\nkind = 'chat'\nmodels = ['gpt', 'gpt-mini']\n"
        "context = 128000\nomit = 'seed'\nthinking_limit = 'reasoning'\n[models.gpt]\nverifier = {kind = 'judge'}\n"
    )
    settings = configure(tmp_path, text)
    assert settings.local_models() == {}
    assert not settings.has_local_engine
    assert settings.engine_addresses == ()
    expected = ChatOptions(("gpt", "gpt-mini"), 128_000, frozenset({"seed"}), thinking_limit="reasoning")
    assert settings.engines["hosted"].chat == expected
    engine = connect(settings)
    assert isinstance(engine, RoutedEngine)
    assert engine._engine_for("gpt") is engine._engine_for("gpt-mini") is engine._main
    assert len(engine._all) == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("kind = 'french'", "must be one of reasoner, vllm, sglang, llamacpp, openai, chat"),
        ("prefill = 'prefix'", "'prefill' belongs to servers of kind 'chat'"),
        ("thinking_limit = 'reasoning'", "'thinking_limit' belongs to servers of kind 'chat'"),
        (
            "kind = 'chat'\nprefill = 'continue_final_message'\nthinking_limit = 'reasoning'",
            "'thinking_limit' is for hosted servers: reach a vLLM or SGLang by kind = 'vllm' or 'sglang'",
        ),
        (
            "kind = 'openai'\nobeys_priorities = true",
            "'obeys_priorities' is for a vLLM or SGLang that was started with",
        ),
        ("kind = 'chat'\ntokenizer = 'x'", "a chat server needs no 'tokenizer'"),
        ("[engines.b]\nurl = 'http://b'\nmodels = 'm'", "'m' is a model of engines.b, too"),
        ("[models.m]\nurl = 'http://b'", "'m' has a place in [models.m], too"),
        ("api_key_env = 'NOWHERE'", "engines.a.api_key_env: the environment has no variable 'NOWHERE'"),
    ],
)
def test_an_invalid_server_is_refused_with_a_correction(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(tmp_path, f"[engines.a]\nurl = 'http://a'\nmodels = ['m']\n{lines}\n")
    assert message in str(caught.value)


class ChatCatalog(Catalog):
    async def models(self) -> list[ModelInfo]:
        can_do = frozenset(Capability) - {Capability.CONTINUATION, Capability.LOGPROBS}
        return [replace(info, capabilities=can_do) for info in self._infos]


async def test_a_strategy_that_the_models_server_cannot_run_is_refused_with_those_it_can(tmp_path: Path) -> None:
    text = "[engines.hosted]\nurl = 'https://api.example/v1'\nkind = 'chat'\nmodels = ['gpt']\n"
    settings = configure(tmp_path, text, model="gpt")
    for name in ("budget_forcing", "deepconf"):
        job = JobRequest.model_validate({"problem": "?", "strategy": {"name": name}, "verifier": None})
        with pytest.raises(JobRefused, match=f"'{name}' continues unfinished .* use one of greedy, self_consistency"):
            await resolve_job(job, settings, ChatCatalog("gpt"))
    job = JobRequest.model_validate({"problem": "?", "strategy": {"name": "self_consistency"}})
    assert (await resolve_job(job, settings, ChatCatalog("gpt"))).model == "gpt"


def test_models_of_a_server_have_the_list_prices_of_its_provider_unless_they_have_their_own(tmp_path: Path) -> None:
    engines = {"hosted": {"url": "http://h", "kind": "chat", "models": ["gpt-4o-mini", "ours"], "prices": "openai"}}
    own = {"ours": {"prices": {"prompt": 3.0, "generated": 5.0}}}
    settings = load_settings(engines=engines, models=own, model="gpt-4o-mini")
    assert settings.prices["gpt-4o-mini"].generated > settings.prices["gpt-4o-mini"].cached > 0
    assert settings.prices["ours"].generated == 5.0
    assert settings.price_sources["ours"] == "[models.ours.prices]"
    assert re.fullmatch(r"openai in genai-prices [\d.]+", settings.price_sources["gpt-4o-mini"])
    described = describe_defaults(ModelInfo("gpt-4o-mini", "generate", 256, 100, 1000), settings)
    assert described["prices"]["source"] == settings.price_sources["gpt-4o-mini"]
    message = r"engines.hosted.prices: .*no model 'ours' of openai.*\[models.ours.prices\]"
    with pytest.raises(ConfigError, match=message):
        load_settings(engines=engines, model="gpt-4o-mini")
