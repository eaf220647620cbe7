"""The engine server as a program: command line, start, signals and end."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import (
    Completion,
    EngineError,
    EngineUnavailable,
)
from engine.remote.http import HttpEngine
from engine.server.app import main
from tests.engine.conftest import Checkpoints
from tests.engine.server.calls import collect, sampled


def test_a_wrong_model_argument_prints_one_line_and_exits_with_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for argument, message in (
        ("nothing", "NAME=PATH"),
        (f"m={tmp_path}", "config.json"),
        ("m=/nowhere", "not a folder"),
    ):
        assert main(["--model", argument]) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert message in captured.err
        assert captured.out == ""


def test_every_engine_option_is_a_command_line_option(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[EngineOptions] = []

    def refuse(models: object, options: EngineOptions, templates: object, adapters: object) -> LocalEngine:
        asked.append(options)
        raise EngineError("enough")

    monkeypatch.setattr("engine.server.app.LocalEngine", refuse)
    switches = {"draft": "ngram", "draft_length": 5, "deterministic": True, "debug": True, "strict_config": True}
    switches |= {"cache_disk": "/disk", "cache_disk_gb": 2.5, "cache_host_gb": 0.5}
    wanted = EngineOptions(640, 8, 3, 50, 128, lease_share=0.25, lease_seconds=9.0, **switches)  # type: ignore[arg-type]
    options = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in ((name.replace("_", "-"), value) for name, value in asdict(wanted).items())
    ]
    assert main(["--model", "m=/nowhere", *options]) == main(["--model", "m=/nowhere"]) == 2
    assert asked == [wanted, EngineOptions(draft="auto")]


@pytest.mark.parametrize(
    "option",
    [["--lease-share", "2"], ["--lease-seconds", "0"], ["--kv-tokens", "0"], ["--threads", "-1"], ["--port", "x"], []],
)
def test_invalid_options_are_usage_errors(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(option and ["--model", "m=/nowhere", *option])
    assert leaving.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_objects_made_during_loading_are_excluded_from_garbage_collection(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []

    def serve(server: Any) -> None:
        left.append(sum(1 for one in gc.get_objects() if isinstance(one, type(sys))))
        asyncio.run(server._engine.close())

    monkeypatch.setattr("engine.server.app._Server.run", serve)
    try:
        assert main(["--model", f"m={checkpoints('llama')}"]) == 0
    finally:
        gc.unfreeze()
    assert left == [0]  # of hundreds of modules


def test_the_server_process_prints_when_it_is_ready_and_leaves_nothing_behind(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    socket = tmp_path / "engine.sock"
    command = [sys.executable, "-m", "engine.server.app", "--model", f"m={checkpoints('llama')}", "--uds", str(socket)]
    with subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().endswith("--threads 1: 1 thread\n")
            assert process.stdout.readline() == f"engine ready on {socket}\n"
            answer = asyncio.run(one_answer(f"unix://{socket}"))
            assert len(answer.token_ids) == 20
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert not socket.exists()


def test_a_server_whose_engine_stopped_exits_so_that_it_can_be_restarted(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down(_: object) -> None:
        raise RuntimeError("no such library")

    monkeypatch.setattr("engine.core.local_engine._create_governor", break_down)
    socket = tmp_path / "engine.sock"
    try:
        assert main(["--model", f"m={checkpoints('llama')}", "--uds", str(socket)]) == 1
    finally:
        gc.unfreeze()
    assert "it stopped: RuntimeError('no such library')" in capsys.readouterr().err
    assert not socket.exists()


def test_signals_end_requests_in_flight_with_an_error_and_no_traceback(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    socket = tmp_path / "engine.sock"
    command = [sys.executable, "-m", "engine.server.app", "--model", f"m={checkpoints('llama')}", "--uds", str(socket)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([*command, "--threads", "1"], text=True, **pipes) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().endswith("--threads 1: 1 thread\n")
            assert process.stdout.readline() == f"engine ready on {socket}\n"
            with pytest.raises(EngineUnavailable):
                asyncio.run(interrupted(f"unix://{socket}", process))
            assert process.wait(30) == 130
            assert process.stdout.read() == ""
        finally:
            process.kill()


async def interrupted(address: str, process: subprocess.Popen[str]) -> None:
    """Send a signal at every token, like repeated Ctrl-C."""
    client = HttpEngine(address)
    try:
        async for _ in client.generate(sampled(64, 200), stream=True):
            process.send_signal(signal.SIGINT)
    finally:
        await client.close()


async def one_answer(address: str) -> Completion:
    client = HttpEngine(address)
    [completion] = await collect(client, sampled(1))
    await client.close()
    return completion
