"""Settings that are passed to the engine and worker processes."""

from __future__ import annotations

import re
import socket

import pytest
from typer.testing import CliRunner

from api.cli.entry.app import app
from api.roles.serve import run_engine
from api.roles.supervisor import ENGINE_SETTINGS, engine_command, worker_pools
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError
from engine.server.app import main
from workers.config.settings import QUEUES, Settings, load_settings
from workers.config.types import ConfigError


def test_configured_sizes_are_passed_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    values = (640, 6, 8, 3, 50, 0.25, 9.0, "disk", 2.5, 0.5, True, "cpu", "float32", "int8", 0.5, True, 1)
    sizes = dict(zip(ENGINE_SETTINGS, values, strict=True))
    settings = load_settings(**{f"engine_{name}": size for name, size in sizes.items()})
    command = engine_command(settings, ["--port", "0"])
    threads: list[int] = []
    asked: list[EngineOptions] = []

    def refuse(models: object, options: EngineOptions, templates: object, adapters: object) -> None:
        asked.append(options)
        raise EngineError("enough")

    monkeypatch.setattr("engine.server.app.LocalEngine", refuse)
    monkeypatch.setattr("engine.server.app.torch.set_num_threads", threads.append)
    assert main(command[command.index("engine.server.app") + 1 :]) == 2
    assert threads == [sizes.pop("threads")]
    assert {name: getattr(asked[0], name) for name in sizes} == sizes


def test_without_configured_sizes_the_engines_defaults_apply() -> None:
    command = engine_command(load_settings(), ["--port", "0"])
    assert "--deterministic" not in command
    assert not [word for word in command if word.removeprefix("--").replace("-", "_") in ENGINE_SETTINGS]


def test_an_engine_is_not_started_where_another_server_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr("api.roles.serve.os.execv", lambda program, command: started.append(program))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .*choose another port"):
            run_engine(load_settings(engine_url=f"http://127.0.0.1:{port}"))
    assert not started


def test_a_worker_gets_its_queues_and_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Settings] = []
    monkeypatch.setattr("api.roles.serve.run_worker", started.append)
    run = CliRunner().invoke
    assert run(app, ["worker", "--queues", "batch, interactive,batch", "--slots", "3"]).exit_code == 0
    assert run(app, ["worker"]).exit_code == 0
    assert [(one.queues, one.concurrency) for one in started] == [(("batch", "interactive"), 3), (QUEUES, 32)]
    refused = run(app, ["worker", "--queues", "fast"])
    assert isinstance(refused.exception, ConfigError)
    assert re.search(r"--queues.*'interactive', 'webhooks' or 'batch'", str(refused.exception))
    assert run(app, ["worker", "--slots", "0"]).exit_code == 2
    assert len(started) == 2


def test_every_queue_has_a_worker_process_whatever_pools_are_configured() -> None:
    def pools(**settings: object) -> list[tuple[str, int, tuple[str, ...]]]:
        return worker_pools(load_settings(concurrency=5, **settings))

    assert pools() == [("worker", 5, QUEUES)]
    assert pools(pools={"batch": 2}) == [("worker", 5, ("interactive", "webhooks")), ("worker-batch", 2, ("batch",))]
    every = {"interactive": 1, "batch": 2, "webhooks": 3}
    assert pools(pools=every) == [(f"worker-{queue}", slots, (queue,)) for queue, slots in every.items()]
