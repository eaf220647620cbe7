"""The benchmark of servers under load: AIPerf's export, and a run with a stand-in for the tool and for each server."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.engine.measure import OURS
from benchmarks.engine.process import BenchError
from benchmarks.served import __main__ as command
from benchmarks.served.aiperf import EXPORT, SAMPLING, Level, Limits, Tool, read_export
from benchmarks.served.servers import LLAMA, MODEL, VLLM, Server, list_servers, place, split_cores, write_greedily

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("aiperf_export.json").read_text())
"""Export of AIPerf 0.13 about four streams, without the figures that nobody reads."""

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

port, fault = int(sys.argv[1]), sys.argv[2]
if fault == "does not start":
    sys.exit("MemoryError: no room")

class Handler(BaseHTTPRequestHandler):
    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, {})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if asked["max_tokens"] > 8 and fault == "fails under load":
            return self.answer(500, {})
        self.answer(200, {"choices": [{"text": "another" if fault == "another model" else "text"}]})

ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

TOOL = """#!PYTHON
import json, os, sys, urllib.request
from pathlib import Path

if sys.argv[1:] == ["--version"]:
    sys.exit(print("0.13.0"))
assert sys.argv[1] == "profile"
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
streams = int(given["--concurrency"])
body = json.dumps({"max_tokens": int(given["--osl"])} | json.loads(given["--extra-inputs"])).encode()
urllib.request.urlopen(urllib.request.Request(given["--url"] + "/v1/completions", body), timeout=30)
export = json.loads(Path("RECORDED").read_text())
export["goodput"]["avg"] = streams / 2
export["time_to_first_token"]["p99"] = 1000 * streams
folder = Path(given["--artifact-dir"])
(folder / "EXPORT").write_text(json.dumps(export))
"""


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    """Return a program that sends one request, and exports the recorded figures with others for each load."""
    text = TOOL.replace("PYTHON", sys.executable).replace("EXPORT", EXPORT)
    program = tmp_path / "aiperf"
    program.write_text(text.replace("RECORDED", str(Path(__file__).with_name("aiperf_export.json"))))
    program.chmod(0o700)
    return program


def stand_in(name: str, fault: str = "") -> Server:
    return Server(
        name=name,
        form="a stand-in",
        command=(sys.executable, "-c", SERVER, "{port}", fault),
        health="/health",
        find_version=lambda _: "1.0",
    )


def test_figures_are_those_of_the_export() -> None:
    assert read_export(RECORDED, OURS, 4) == Level(
        server=OURS,
        streams=4,
        requests=8,
        failed=0,
        first_p50=2643.227281,
        first_p99=2710.38276605,
        token_p50=56.094930420634924,
        token_p99=pytest.approx(84.72, abs=0.01),
        tokens_per_second=45.269187799134166,
        goodput=0,
        good_share=0,
        prompt_tokens=256,
    )


def test_failed_requests_are_counted() -> None:
    errors = [{"error_details": {"type": "ClientOSError"}, "count": 1}, {"error_details": {"code": 500}, "count": 3}]
    level = read_export(RECORDED | {"error_summary": errors}, OURS, 4)
    assert (level.requests, level.failed) == (8, 4)


def test_a_level_with_short_answers_does_not_count() -> None:
    with pytest.raises(BenchError, match="answers have 3 to 64 tokens at 4 streams of ours, not 64"):
        read_export(RECORDED | {"output_sequence_length": {"min": 3.0, "max": 64.0}}, OURS, 4)


def run(tool: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **faults: str) -> int:
    names = {OURS: "ours", LLAMA: "llama", VLLM: "vllm"}
    servers = [stand_in(name, faults.get(key, "")) for name, key in names.items()]
    monkeypatch.setattr(command, "list_servers", lambda *_: servers)
    monkeypatch.setattr(command, "checkpoint", lambda *_: out)
    peers = ["--vllm", "/somewhere/python", "--llama-server", "/somewhere/llama-server"]
    return command.main(["--aiperf", str(tool), *peers, "--streams", "1,2", "--out", str(out)])


def test_servers_are_measured_at_each_load(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(tool, Path("out"), monkeypatch) == 0
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(level["server"], level["streams"], level["goodput"]) for level in told["levels"]] == [
        (name, streams, streams / 2) for streams in (1, 2) for name in (OURS, LLAMA, VLLM)
    ]
    assert told["left_out"] == []
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| 2 | vllm | 8 | 0 | 2643 | 2000 | 56.1 | 84.7 | 45 | 1.00 | 0 % |" in table
    assert "--vllm PYTHON --llama-server PATH" in table
    assert "aiperf 0.13.0, llama-server 1.0, ours 1.0, vllm 1.0." in table
    assert not any(place in table + json.dumps(told) for place in ("127.0.0.1", "/somewhere", str(tmp_path)))
    assert (tmp_path / "out" / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("fault", "stage", "reason"),
    [
        ("does not start", "start", "vllm did not start: MemoryError: no room"),
        ("another model", "start", "it does not compute the same model"),
        ("fails under load", "1 streams", "AIPerf failed at 1 streams of vllm"),
    ],
)
def test_a_peer_that_fails_is_left_out(
    fault: str, stage: str, reason: str, tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tool, tmp_path / "out", monkeypatch, vllm=fault) == 0
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(peer["peer"], peer["stage"]) for peer in told["left_out"]] == [(VLLM, stage)]
    assert told["left_out"][0]["reason"].startswith(reason)
    counts = [sum(level["server"] == name for level in told["levels"]) for name in (OURS, LLAMA, VLLM)]
    assert counts == [2, 2, 0]


def test_nothing_is_written_without_our_server(
    tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tool, tmp_path / "out", monkeypatch, ours="does not start") == 1
    assert "ours did not start" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tool_or_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    tool = Tool(program=missing, tokenizer=tmp_path, seconds=1, limits=Limits(1, 1), cores=os.sched_getaffinity(0))
    with pytest.raises(BenchError, match="AIPerf cannot be started: No such file"):
        tool.drive(OURS, "http://127.0.0.1:9", 1, tmp_path)
    server = Server("peer", "", (str(missing),), "/health", lambda _: "")
    with (
        pytest.raises(BenchError, match="missing cannot be started: No such file"),
        server.run(os.sched_getaffinity(0), tmp_path / "log"),
    ):
        pass


def test_cores_are_kept_apart_while_a_process_starts() -> None:
    before = os.sched_getaffinity(0)
    assert split_cores({3, 1, 2, 0}) == ([0, 1], [2, 3])
    assert split_cores({7}) == ([7], [7])
    with place([min(before)]):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_our_server_takes_what_the_tool_sends(tmp_path: Path) -> None:
    """Start the engine's own server as the benchmark does, on a small model."""
    from benchmarks.engine.checkpoint import checkpoint
    from tests.benchmarks.test_workloads import TINY

    [server] = list_servers(checkpoint("tiny", TINY, tmp_path), threads=1, streams=2, vllm=None, llama=None)
    with server.run(os.sched_getaffinity(0), tmp_path / "log") as url:
        assert write_greedily(url) == write_greedily(url)
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 5, **SAMPLING}
        answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60).raise_for_status()
        assert answer.json()["usage"]["completion_tokens"] == 5
