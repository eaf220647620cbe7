"""``reasoner batch`` against a stub service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from api.cli import batch as cli_batch
from api.cli.entry.app import app
from api.cli.options import Connection
from reasoner.client import Client
from tests.specs import build_spec

BATCH: dict[str, Any] = {
    "id": "batch_1",
    "endpoint": "/v1/jobs",
    "model": None,
    "errors": None,
    "input_file_id": "",
    "completion_window": "none",
    "status": "in_progress",
    "output_file_id": None,
    "error_file_id": None,
    "created_at": 1,
    **dict.fromkeys(
        f"{name}_at"
        for name in (
            *("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"),
        )
    ),
    "request_counts": {"total": 2, "completed": 0, "failed": 0},
    "budget": {"tokens": 500},
    "metadata": {},
    "usage": {},
    "counts": {"queued": 2},
    "unassigned": 375,
    "jobs": [
        {"id": "job_1", "status": "queued", "answer": None, "tokens": 0, "granted": 62},
        {"id": "job_2", "status": "queued", "answer": "[bold]7", "tokens": 0, "granted": 62},
    ],
}
ENDED = BATCH | {"status": "completed", "completed_at": 2, "counts": {"completed": 2}, "usage": {"generated": 480}}


class Service:
    """Returns prepared responses in turn and records the requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[dict[str, Any]] = [BATCH]
        self.asked: list[tuple[str, Any]] = []
        monkeypatch.setattr(Connection, "connect", lambda _: self._client())
        monkeypatch.setattr(cli_batch, "POLL_SECONDS", 0.0)

    def _client(self) -> Client:
        return Client("http://service", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        is_json = not request.headers.get("content-type", "").startswith("multipart/")
        body = json.loads(request.content or "null") if is_json else request.content
        self.asked.append((f"{request.method} {request.url.path}", body))
        if request.url.path.endswith("/content"):
            return httpx.Response(200, content=request.url.path.split("/")[-2].encode())
        return httpx.Response(200, json=self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    return Service(monkeypatch)


def batch(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["batch", *arguments], env={"COLUMNS": "160"})


def test_a_file_becomes_a_batch_whose_jobs_keep_their_own_strategy(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text('{"problem": "1?"}\n\n{"problem": "2?", "strategy": {"name": "greedy"}}\n')
    result = batch("submit", str(file), "--tokens", "500", "--strategy", "weighted_vote", "--n", "64", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["id"] == "batch_1"
    [(call, body)] = service.asked
    assert call == "POST /v1/batches"
    assert body == {
        "jobs": [
            {"problem": "1?", "strategy": {"name": "weighted_vote", "n": 64}},
            {"problem": "2?", "strategy": {"name": "greedy"}},
        ],
        "budget": {"tokens": 500},
    }


def test_waiting_follows_a_batch_to_its_end(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text('{"problem": "1?"}')
    service.answers = [BATCH, BATCH | {"status": "in_progress"}, ENDED]
    result = batch("submit", str(file), "--tokens", "500", "--wait", "--json")
    assert json.loads(result.stdout)["status"] == "completed"
    assert [call for call, _ in service.asked] == ["POST /v1/batches", *["GET /v1/batches/batch_1"] * 2]


def test_a_file_of_requests_is_run_and_its_results_are_written(service: Service, tmp_path: Path) -> None:
    file, out = tmp_path / "lines.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"custom_id": "1"}\n{"custom_id": "2"}\n')
    made = BATCH | {"input_file_id": "file-1", "completion_window": "24h", "jobs": None, "budget": None}
    counts = {"total": 2, "completed": 1, "failed": 1}
    ends = {"status": "completed", "request_counts": counts, "output_file_id": "file-2", "error_file_id": "file-3"}
    service.answers = [{"id": "file-1"}, made, made | ends]
    result = batch("run", str(file), "--endpoint", "/v1/jobs", "--tokens", "90", "--out", str(out))
    assert (result.exit_code, result.exception.__class__) == (1, SystemExit), result.output
    assert (out.read_text(), (tmp_path / "out.jsonl.errors").read_text()) == ("file-2", "file-3")
    assert "2 requests" in result.stdout
    (upload, content), (submit, body), *_ = service.asked
    assert (upload, submit, b'{"custom_id": "2"}' in content) == ("POST /v1/files", "POST /v1/batches", True)
    shared = {"endpoint": "/v1/jobs", "completion_window": "24h", "budget": {"tokens": 90}}
    assert body == shared | {"input_file_id": "file-1"}


def test_a_batch_is_shown_with_its_jobs_and_model_text_as_text(service: Service) -> None:
    service.answers = [ENDED]
    shown = batch("show", "batch_1").stdout
    assert "2 completed" in shown
    assert "480 of 500 tokens, 375 unassigned" in shown
    assert "[bold]7" in shown
    cancelled = batch("cancel", "batch_1", "--json")
    assert json.loads(cancelled.stdout)["id"] == "batch_1"
    assert service.asked[-1][0] == "POST /v1/batches/batch_1/cancel"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('{"problem": "1?"}\n{"problem"\n', "line 2: not a job"),
        ('{"problem": "1?"}\n\n"2?"\n', "line 3: not a job"),
        ("\n", "contains no jobs"),
        (None, "No such file"),
    ],
)
def test_a_file_with_a_bad_line_is_refused_with_the_line(
    service: Service, tmp_path: Path, text: str | None, hint: str
) -> None:
    file = tmp_path / "jobs.jsonl"
    if text is not None:
        file.write_text(text)
    result = batch("submit", str(file), "--tokens", "500")
    assert result.exit_code == 2
    assert hint in " ".join(result.output.replace("│", " ").split())
    assert not service.asked


def test_waiting_for_a_batch_prints_its_id_first_and_why_jobs_failed(service: Service, tmp_path: Path) -> None:
    file = jobs_file(tmp_path, count=4)
    states = ["completed", "failed", "cancelled", "failed"]
    jobs = [job | {"id": f"job_{n}", "status": state} for n, state in enumerate(states) for job in [BATCH["jobs"][0]]]
    counts = {"completed": 1, "failed": 2, "cancelled": 1}
    lost = {
        "id": "job_1",
        "status": "failed",
        "created_at": 1.0,
        "spec": build_spec(problem="?").model_dump(),
        "error": {"code": "max_attempts", "message": "three workers [died]\x1b[2J"},
    }
    service.answers = [BATCH, ENDED | {"counts": counts, "jobs": jobs}, lost]
    result = batch("submit", str(file), "--tokens", "500", "--wait", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["counts"]["failed"] == 2
    assert result.stderr.splitlines()[0] == "batch_1: 4 jobs"
    assert "3 of 4 jobs failed or were cancelled" in result.stderr
    assert "2 × max_attempts: three workers [died]" in result.stderr
    assert "1 × cancelled" in result.stderr
    assert "\x1b" not in result.stderr
    assert [path for path, _ in service.asked].count("GET /v1/jobs/job_1") == 1


def test_a_batch_without_failures_or_without_waiting_exits_with_success(service: Service, tmp_path: Path) -> None:
    file = jobs_file(tmp_path, count=2)
    service.answers = [BATCH, ENDED | {"counts": {"completed": 1, "incomplete": 1}}]
    assert batch("submit", str(file), "--tokens", "500", "--wait").exit_code == 0
    service.answers = [BATCH]
    result = batch("submit", str(file), "--tokens", "500")
    assert result.exit_code == 0
    assert "batch_1" in result.stdout


def jobs_file(folder: Path, count: int) -> Path:
    file = folder / "jobs.jsonl"
    file.write_text('{"problem": "?"}\n' * count)
    return file
