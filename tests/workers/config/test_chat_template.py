"""A model takes a chat template from its settings: a file, a text, or plain continuation for a base model."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.roles.supervisor import engine_command
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError, TokenizeRequest
from engine.server.command_line import build_parser, read_model_folders, read_templates
from tests.engine.conftest import TEMPLATE, save_random_model
from tests.engine.gguf.files import write_gguf
from workers.config.model_folders import check_models
from workers.config.settings import Settings, load_settings
from workers.config.types import ConfigError

PLACE = "reasoner.toml: models.mine.chat_template"
TURNS = [
    {"role": "system", "content": "step two"},
    {"role": "user", "content": "step one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]


@pytest.fixture(params=["folder", "gguf"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model without a chat template, in the working directory."""
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "checkpoint"
    save_random_model("LlamaForCausalLM", {}, checkpoint)
    (checkpoint / "chat_template.jinja").unlink(missing_ok=True)
    if request.param == "folder":
        return checkpoint
    write_gguf(checkpoint, tmp_path / "model.gguf", "llama")
    return tmp_path / "model.gguf"


def configure(model: Path, template: str | None = None) -> Settings:
    line = "" if template is None else f"chat_template = '''{template}'''\n"
    Path("reasoner.toml").write_text(f"model = 'mine'\nprm = 'none'\n[models.mine]\npath = '{model}'\n{line}")
    return load_settings()


def start(settings: Settings) -> LocalEngine:
    """Return an engine with the models and templates of the command line that the service would use."""
    arguments = build_parser().parse_args(engine_command(settings, [])[3:])
    folders = read_model_folders(arguments.model)
    return LocalEngine(folders, EngineOptions(kv_tokens=256), read_templates(arguments.chat_template, folders))


def test_without_one_the_refusal_names_the_setting_and_plain_continuation(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no chat template.*chat_template\.jinja.*\[models\.NAME\].*'none'"):
        check_models(configure(model))


def configure_form(model: Path, form: str) -> Settings:
    """Return settings that give the template in one of its forms."""
    folder = model if model.is_dir() else model.parent
    (folder / "mine.jinja").write_text(TEMPLATE)
    if form == "beside the model":
        file = model / "reasoner-model.toml" if model.is_dir() else model.with_name("model.gguf.toml")
        file.write_text("chat_template = 'mine.jinja'")
    value = {"file": str((folder / "mine.jinja").relative_to(Path.cwd())), "text": TEMPLATE}.get(form)
    return configure(model, value)


@pytest.mark.parametrize("form", ["file", "text", "beside the model"])
async def test_a_template_of_the_settings_is_the_engines(form: str, model: Path) -> None:
    settings = configure_form(model, form)
    check_models(settings)
    engine = start(settings)
    try:
        expected = engine.tokenizer("mine").encode("<|user|>step one<|end|><|assistant|>")
        assert await engine.tokenize(TokenizeRequest("mine", TURNS[1:2])) == expected
        assert (await engine.models())[0].chat_template == TEMPLATE
    finally:
        await engine.close()


async def test_a_base_model_continues_the_texts_plainly(model: Path) -> None:
    settings = configure(model, "none")
    check_models(settings)
    engine = start(settings)
    tokenizer = engine.tokenizer("mine")
    try:
        for messages, text in (
            (TURNS[1:2], "step one"),
            (TURNS[:2], "step two\n\nstep one"),
            (TURNS, "step two\n\nUser: step one\n\nAssistant: two\n\nUser: three\n\nAssistant:"),
            ([{"role": "user", "content": [{"type": "text", "text": "step one"}]}], "step one"),
        ):
            assert await engine.tokenize(TokenizeRequest("mine", messages)) == tokenizer.encode_prompt(text)
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("not-here.jinja", rf"{PLACE}: .*not-here\.jinja cannot be read as a chat template"),
        ("a\n{{ b", rf"{PLACE}: the template's text, line 2: it is no chat template"),
        ("{{ messages | no_such_filter }}", rf"{PLACE}: .*line 1: .*no_such_filter"),
        ("", rf"{PLACE}: it is empty: give a \.jinja file"),
        ("broken.jinja", rf"{PLACE}: .*broken\.jinja, line 3: it is no chat template"),
        ("empty.jinja", rf"{PLACE}: .*empty\.jinja has 0 characters"),
        ("binary.jinja", rf"{PLACE}: .*binary\.jinja cannot be read"),
    ],
)
def test_a_broken_template_is_named_with_its_place(
    value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.jinja").write_text("a\nb\n{% if x %}")
    (tmp_path / "empty.jinja").write_text("")
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(ConfigError, match=message):
        configure(tmp_path, value)


def test_a_template_that_does_not_end_is_refused(model: Path) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"models\.mine\.chat_template: it is no usable template"):
        check_models(configure(model, endless))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.far]\nurl = 'http://gpu:8000'\n", "'chat_template' belongs to a model with 'path'"),
        (
            "[engines.gpu]\nurl = 'http://gpu:8000'\nmodels = ['far']\n[models.far]\n",
            "its server uses its own template",
        ),
        ("engine_url = 'http://gpu:8000'\nmodel = 'far'\n[models.far]\n", "its server uses its own template"),
    ],
)
def test_a_template_for_another_server_is_refused(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reasoner.toml").write_text(f"{text}chat_template = 'none'\n")
    with pytest.raises(ConfigError, match=message):
        load_settings()


def test_the_command_line_refuses_a_template_of_no_model() -> None:
    with pytest.raises(EngineError, match="a name of --model: policy"):
        read_templates(["other=none"], {"policy": "x"})
    with pytest.raises(EngineError, match="given twice"):
        read_templates(["policy=none", "policy=none"], {"policy": "x"})
    with pytest.raises(EngineError, match=r"--chat-template policy=…: .*cannot be read"):
        read_templates(["policy=no.jinja"], {"policy": "x"})
