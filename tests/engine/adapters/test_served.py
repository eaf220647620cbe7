"""Adapters as models of the engine, of its server and of the service's settings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from api.roles.supervisor import engine_command
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, EngineError, InvalidRequest, TokenizeRequest
from engine.server.app import create_app
from engine.server.command_line import build_parser, read_adapter_folders
from tests.engine.adapters.lora import INVOCATION, save_adapter
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import generate
from workers.config.settings import Settings, load_settings
from workers.config.types import ConfigError

PROMPT = tuple(range(10, 40))
OPTIONS = EngineOptions(kv_tokens=2048, max_running=8, debug=True, deterministic=True)


@pytest.fixture
async def engine(checkpoints: Checkpoints, tmp_path: Path) -> AsyncIterator[LocalEngine]:
    base = checkpoints("qwen3")
    adapters = {
        "writer": save_adapter(tmp_path / "writer", base, modules=("q_proj", "up_proj")),
        "judge": save_adapter(tmp_path / "judge", base, seed=1, alora_invocation_tokens=list(INVOCATION)),
    }
    local = LocalEngine({"m": base, "other": checkpoints("llama")}, OPTIONS, adapters=adapters)
    yield local
    await local.close()


async def complete(engine: LocalEngine, model: str) -> Completion:
    wanted = generate((*PROMPT, *INVOCATION), [Branch(3, 0, 12)], model=model, ignore_eos=True)
    [done] = [event async for event in engine.generate(wanted) if isinstance(event, Completion)]
    return done


async def test_an_adapter_is_a_model_with_a_parent(engine: LocalEngine) -> None:
    base, writer, judge, other = await engine.models()
    assert [one.id for one in (base, writer, judge, other)] == ["m", "writer", "judge", "other"]
    assert (base.parent, writer.parent, judge.parent) == ("", "m", "m")
    assert (writer.invocation, judge.invocation) == ((), INVOCATION)
    assert len({base.fingerprint, writer.fingerprint, judge.fingerprint}) == 3
    # q: 96 by 48, up: 96 by 48, in two layers, rank 4
    assert writer.parameters - base.parameters == 2 * 2 * 4 * (96 + 48)
    assert len({(await complete(engine, model)).token_ids for model in ("m", "writer", "judge", "other")}) == 4
    assert await engine.tokenize(TokenizeRequest("judge", "step")) == await engine.tokenize(
        TokenizeRequest("m", "step")
    )
    with pytest.raises(InvalidRequest, match="served are m, other, writer, judge"):
        engine.generate(generate(PROMPT, [Branch(1, 0, 3)], model="nobody"))


async def test_the_server_lists_adapters_and_takes_them_as_models(engine: LocalEngine) -> None:
    transport = httpx.ASGITransport(create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        listed = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
        assert listed["judge"]["parent"] == "m"
        assert listed["judge"]["invocation"] == list(INVOCATION)
        body = {"prompt": [*PROMPT], "max_tokens": 4, "return_token_ids": True, "temperature": 0}
        answers = [(await client.post("/v1/completions", json=body | {"model": name})) for name in ("m", "writer")]
        tokens = [answer.json()["choices"][0]["token_ids"] for answer in answers]
        assert tokens[0] != tokens[1]
        refusal = await client.post("/v1/completions", json=body | {"model": "judge"})
        assert refusal.status_code == 400
        assert "begins at the tokens [7, 9, 8]" in refusal.json()["error"]["message"]


def configure(text: str) -> Settings:
    Path("reasoner.toml").write_text(text)
    return load_settings()


def test_settings_name_adapters_of_the_services_model(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, model = save_adapter(tmp_path / "judge", checkpoints("qwen3")), checkpoints("qwen3")
    start = f"model = 'mine'\nprm = 'none'\n[models.mine]\npath = '{model}'\n"
    settings = configure(
        f"{start}verifier = {{kind = 'graded', model = 'judge'}}\n[models.judge]\nadapter = '{folder.name}'\n"
    )
    settings.check_endpoints()
    arguments = build_parser().parse_args(engine_command(settings, [])[3:])
    assert read_adapter_folders(arguments.adapter) == {"judge": str(folder)}
    with pytest.raises(ConfigError, match=r"models.judge.adapter: nowhere is no folder of an adapter"):
        configure(f"{start}[models.judge]\nadapter = 'nowhere'\n").check_endpoints()
    with pytest.raises(ConfigError, match="a model with 'adapter' has path, url and chat_template of the model"):
        configure(f"{start}[models.judge]\nadapter = 'judge'\npath = 'policy'\n")
    far = "[models.mine]\nurl = 'http://far'\n[models.judge]\nadapter = 'judge'\n"
    with pytest.raises(ConfigError, match="'mine' is served elsewhere: give the adapter to its server"):
        configure(f"model = 'mine'\nprm = 'none'\n{far}").check_endpoints()
    # An engine listens at that address, and the other roles know that it serves the adapter.
    settings = configure(f"engine_url = 'http://127.0.0.1:8100'\n{start}[models.judge]\nadapter = 'judge'\n")
    settings.check_endpoints()
    assert f"judge={folder}" in engine_command(settings, [])


def test_wrong_options_are_refused() -> None:
    with pytest.raises(EngineError, match="--adapter 'x' must be NAME=FOLDER"):
        read_adapter_folders(["x"])
    with pytest.raises(EngineError, match="--adapter a=… is given twice"):
        read_adapter_folders(["a=b", "a=c"])
