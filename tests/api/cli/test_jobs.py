"""Requests and output of ``reasoner solve`` and ``reasoner jobs``."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console
from typer.testing import CliRunner

from api.cli import jobs as cli_jobs
from api.cli import options as cli_options
from api.cli.console import result_console
from api.cli.entry.app import app
from api.cli.options import Connection
from api.cli.render import print_tree, watch_tree
from reasoner.client import Client, ServiceError
from reasoner.jobs.events import Event
from reasoner.jobs.job import Job
from reasoner.jobs.spec import StrategySpec
from tests.specs import build_spec
from workers.config.settings import Settings


class Sent(Exception):
    """Raised instead of sending a request; carries the body."""


def sent(
    monkeypatch: pytest.MonkeyPatch, *options: str, problem: str = "?", stdin: str | None = None
) -> dict[str, Any]:
    class FakeClient:
        def __enter__(self) -> FakeClient:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def default_strategy(self) -> str:
            return "self_consistency"

        def submit(self, spec: dict[str, Any]) -> None:
            raise Sent(spec)

    monkeypatch.setattr(Connection, "connect", lambda _: FakeClient())
    result = CliRunner().invoke(app, ["jobs", "submit", problem, *options], input=stdin)
    assert isinstance(result.exception, Sent), result.output
    body: dict[str, Any] = result.exception.args[0]
    return body


def test_verifier_and_answer_are_given_as_a_word_or_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = {"kind": "numeric", "expected": 4}
    body = sent(monkeypatch, "--verifier", json.dumps(rule), "--answer", '{"extract": "hash"}')
    assert body["verifier"] == rule
    assert body["answer"] == {"extract": "hash"}
    body = sent(monkeypatch, "--verifier", "judge", "--answer", "text", "--n", "4")
    assert body["verifier"] == {"kind": "judge"}
    assert body["answer"] == "text"
    assert body["strategy"] == {"name": "best_of_n", "n": 4}
    assert "verifier" not in sent(monkeypatch)


def test_parameters_without_a_name_belong_to_the_default_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sent(monkeypatch, "--n", "4")["strategy"] == {"name": "self_consistency", "n": 4}
    assert sent(monkeypatch, "--strategy", "beam", "--n", "4")["strategy"] == {"name": "beam", "n": 4}


def test_malformed_json_in_an_option_is_wrong_usage() -> None:
    result = CliRunner().invoke(app, ["jobs", "submit", "?", "--verifier", "{kind: numeric}"])
    assert result.exit_code == 2
    assert "--verifier" in result.output
    assert "not valid JSON" in result.output


@pytest.mark.parametrize("gone", [False, True])
def test_interrupting_solve_cancels_its_job(monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    cancelled: list[str] = []

    class FakeClient:
        def submit(self, _spec: dict[str, Any]) -> SimpleNamespace:
            return SimpleNamespace(id="job_1")

        def cancel(self, job_id: str) -> None:
            cancelled.append(job_id)
            if gone:
                raise ServiceError("nobody answers")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_jobs, "open_service", lambda *_: nullcontext((FakeClient(), None)))
    monkeypatch.setattr(cli_jobs, "show_progress", interrupted)
    result = CliRunner().invoke(app, ["solve", "?"])
    assert cancelled == ["job_1"]
    assert ("job_1 was not cancelled: nobody answers" if gone else "job_1 is cancelled") in result.stderr
    assert result.exit_code not in (0, 2)


def node(name: str, text: str, score: float | None = None, state: str = "step") -> dict[str, Any]:
    parent = name.rpartition(".")[0]
    return {"id": name, "parent": parent, "text": text, "score": score, "state": state}


def printed(tree: dict[str, Any], max_nodes: int = 40) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    print_tree(console, tree, max_nodes=max_nodes)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_drawn_tree_escapes_control_characters_and_markup() -> None:
    drawn = printed({"nodes": [node("0", "[red]a[/red]\x1b[2J\x07\u202eb\n\nc")], "best": None})
    assert "[red]a[/red]" in drawn
    assert "b | c" in drawn
    assert not {"\x1b", "\x07", "\u202e"} & set(drawn)


def test_a_drawn_tree_folds_thoughts_and_shows_where_they_were_probed_and_what_for() -> None:
    def part(kind: str, origin: str, chars: int, tokens: int) -> dict[str, Any]:
        return {"kind": kind, "origin": origin, "chars": chars, "tokens": tokens}

    parts = {
        "0": ("one two", [part("thought", "generated", 7, 64)]),
        "0.0": ("</think> Answer:", [part("thought", "injected", 8, 1), part("answer", "injected", 8, 0)]),
        "0.0.0": (" 12", [part("answer", "generated", 3, 2)]),
    }
    nodes = [node(name, text) | {"parts": each} for name, (text, each) in parts.items()]
    text = printed({"best": None, "nodes": nodes})
    assert "[thought, 64 tokens]" in text
    assert "[thought closed by the search] Answer:" in text
    assert "12" in text
    assert "one two" not in text


def test_a_large_tree_keeps_the_chosen_path_and_the_best_nodes_and_counts_the_rest() -> None:
    pruned = [node(str(index), f"pruned{index}", 0.9, "pruned") for index in range(20)]
    nodes = [*pruned, node("20", "start", 0.1), node("20.0", "end", 0.2, "answer"), node("21", "open", 0.5)]
    drawn = printed({"nodes": nodes, "best": "20.0"}, max_nodes=4)
    assert [word for word in ("start", "end", "open") if word in drawn] == ["start", "end", "open"]
    assert drawn.count("pruned)") == 1
    assert "19 more nodes" in drawn


def test_watching_draws_the_live_tree_within_the_height_of_the_terminal() -> None:
    part = {"token_ids": [], "cached": 0, "answer": None, "logprob": -1.0, "part": 0, "tokens": 5, "final": True}
    steps = [
        Event(
            seq=seq,
            type="node",
            at=0.0,
            data={"node": str(seq), "parent": "", "text": f"s{seq}", "reason": "step"} | part,
        )
        for seq in range(2, 60)
    ]
    score = Event(
        seq=60, type="score", at=0.0, data={"node": "59", "scores": [0.9], "score": 0.9, "computed": 3, "cached": 0}
    )
    started = Event(seq=1, type="job.started", at=0.0, data={"attempt": 1})
    console = Console(file=io.StringIO(), width=80, height=20, force_terminal=True, color_system=None)
    heights: list[int] = []

    class FakeClient:
        def events(self, job_id: str) -> Iterator[Event]:
            yield from (started, *steps, score)
            live = console._live_stack[-1]
            heights.append(len(console.render_lines(live.get_renderable())))

    job = Job(id="job_1", status="in_progress", created_at=0.0, spec=build_spec(problem="?"))
    watch_tree(cast(Client, FakeClient()), job, console)
    assert isinstance(console.file, io.StringIO)
    assert heights[0] < 20
    shown = console.file.getvalue()
    assert "0.90 s59 …" in shown
    assert "58 branches" in shown


def test_deleting_prints_one_json_document(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []

    class FakeClient:
        def __enter__(self) -> FakeClient:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def delete(self, job_id: str) -> None:
            gone.append(job_id)

    monkeypatch.setattr(Connection, "connect", lambda _: FakeClient())
    result = CliRunner().invoke(app, ["jobs", "delete", "job_1", "job_2", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"deleted": gone} == {"deleted": ["job_1", "job_2"]}


def test_a_list_in_a_pipe_is_not_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = build_spec(problem="?", strategy=StrategySpec(name="self_consistency"))
    job = Job(id=f"job_{'0' * 32}", status="in_progress", created_at=0.0, spec=spec)

    class FakeClient:
        def __enter__(self) -> FakeClient:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def list(self, **_: object) -> dict[str, Any]:
            return {"data": [job.model_dump()]}

    monkeypatch.setattr(Connection, "connect", lambda _: FakeClient())
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setattr(cli_jobs, "_out", result_console())
    line = CliRunner().invoke(app, ["jobs", "list"]).stdout.splitlines()[1]
    assert line.split()[:3] == [job.id, "in_progress", "self_consistency"]


def test_a_dash_reads_the_question_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sent(monkeypatch, problem="-", stdin="What is\n2 + 2?\n")["problem"] == "What is\n2 + 2?"
    empty = CliRunner().invoke(app, ["jobs", "submit", "-"], input=" \n")
    assert empty.exit_code == 2
    assert "standard input is empty" in empty.stderr


def test_a_system_message_and_a_model_are_part_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    body = sent(monkeypatch, "--system", "Answer in French.", "--model", "policy-large")
    assert (body["system"], body["problem"]) == ("Answer in French.", "?")
    assert body["model"] == "policy-large"
    assert build_spec(body).to_messages()[0]["role"] == "system"
    assert "model" not in sent(monkeypatch)


def test_a_prompt_stop_strings_and_a_limit_are_part_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    body = sent(monkeypatch, "--prompt", "Solve {problem}", "--stop", "a", "--stop", "b", "--max-tokens", "9")
    job = build_spec(body)
    assert (job.prompt, job.stop, job.sampling.max_tokens) == ("Solve {problem}", ["a", "b"], 9)


@pytest.mark.parametrize("alone", [False, True])
def test_solve_names_a_model_to_a_running_service_and_starts_a_private_one_with_it(
    monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    started: list[str] = []

    @contextmanager
    def private(settings: Settings, _: Console) -> Iterator[str]:
        started.append(settings.model)
        yield "http://own"

    class FakeClient:
        def __init__(self, url: str, *_: object) -> None:
            self.url = url

        def __enter__(self) -> FakeClient:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def submit(self, spec: dict[str, Any]) -> None:
            raise Sent(spec | {"url": self.url})

    for module in (cli_jobs, cli_options):
        monkeypatch.setattr(module, "Client", FakeClient)
    monkeypatch.setattr("api.roles.private_service.run_private_service", private)
    monkeypatch.setattr(cli_jobs, "_is_running", lambda _: not alone)
    result = CliRunner().invoke(app, ["solve", "?", "--model", "mine=policy-large" if alone else "mine"])
    assert isinstance(result.exception, Sent), result.output
    body = result.exception.args[0]
    assert body["model"] == "mine"
    assert started == (["mine=policy-large"] if alone else [])
    assert body["url"] == ("http://own" if alone else "http://127.0.0.1:8000")


def test_a_private_service_loads_all_that_a_name_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its models, and the model of its verifier, which may be an alias."""
    names = {
        "panel": {
            "models": [{"model": "policy"}, {"model": "policy-large"}],
            "verifier": {"kind": "judge", "model": "critic"},
        },
        "critic": {"model": "policy-python"},
    }
    monkeypatch.setenv("REASONER_NAMES", json.dumps(names))
    started: list[Settings] = []

    @contextmanager
    def private(settings: Settings, _: Console) -> Iterator[str]:
        started.append(settings)
        raise Sent({})
        yield ""

    monkeypatch.setattr("api.roles.private_service.run_private_service", private)
    monkeypatch.setattr(cli_jobs, "_is_running", lambda _: False)
    result = CliRunner().invoke(app, ["solve", "?", "--model", "panel"])
    assert isinstance(result.exception, Sent), result.output
    assert {"policy", "policy-large", "policy-python"} <= started[0].local_models().keys()


class Listing:
    def __init__(self, *jobs: Job) -> None:
        self.jobs = jobs
        self.since: list[float] = []

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def list(self, **_: object) -> dict[str, Any]:
        return {"data": [job.model_dump() for job in self.jobs]}

    def export(self, *, since: float, **_: object) -> Iterator[str]:
        self.since.append(since)
        return iter(())


def test_the_list_of_jobs_shortens_questions_except_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "How many\n[red]eggs[/red] " + "and more eggs " * 30
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    specs = [build_spec(problem=long), build_spec(messages=said)]  # type: ignore[arg-type]
    jobs = [Job(id=f"job_{n}", status="queued", created_at=0.0, spec=spec) for n, spec in enumerate(specs)]
    monkeypatch.setattr(Connection, "connect", lambda _: Listing(*jobs))
    shown = CliRunner().invoke(app, ["jobs", "list"]).stdout
    assert "How many [red]eggs[/red] and more" in shown
    assert "…" in shown
    assert "Why?" in shown
    assert len(shown.splitlines()) == 3
    assert json.loads(CliRunner().invoke(app, ["jobs", "list", "--json"]).stdout)["data"][0]["spec"]["problem"] == long


def test_an_export_begins_days_ago_at_a_date_or_at_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = Listing()
    monkeypatch.setattr(Connection, "connect", lambda _: listing)
    monkeypatch.setattr("api.cli.options.time", SimpleNamespace(time=lambda: 1_000_000.0))
    day = datetime(2026, 1, 31).timestamp()
    cases = {
        "2d": 1_000_000.0 - 2 * 86_400,
        "90s": 999_910.0,
        "1w": 1_000_000.0 - 604_800,
        "9999w": 0.0,
        "2026-01-31": day,
        "2026-01-31T12:30": day + 45_000,
        "2026-01-31T00:00Z": 1_769_817_600.0,
        "1700000000.5": 1_700_000_000.5,
    }
    for word in cases:
        assert CliRunner().invoke(app, ["jobs", "export", "--since", word]).exit_code == 0
    assert CliRunner().invoke(app, ["jobs", "export"]).exit_code == 0
    assert listing.since == [*cases.values(), 0.0]


@pytest.mark.parametrize("word", ["soon", "-5", "2 days", "1e300", "nan", "2026-13-01", "0001-01-01", ""])
def test_a_malformed_time_is_wrong_usage_that_shows_the_valid_forms(word: str) -> None:
    result = CliRunner().invoke(app, ["jobs", "export", f"--since={word}"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "--since" in result.stderr
    assert "write 2d" in result.stderr


def test_the_list_of_models_names_the_verifier_and_a_probe_that_nothing_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = {"id": "1f", "layers": [2], "parameters": 65}
    jobs: dict[str, Any] = {
        "system": None, "prompt": None, "stop": [], "chat_template_kwargs": {}, "strategy": {"name": "auto"},
        "sampling": {"temperature": 0.6}, "verifier": None,
    }  # fmt: skip
    probed = jobs | {"verifier": {"kind": "probe"}}
    models = [
        {"id": "a", "context": 10, "parameters": 20, "probe": None, "defaults": jobs},
        {"id": "b", "context": 10, "parameters": 20, "probe": probe, "defaults": jobs},
        {
            "id": "c",
            "context": 10,
            "parameters": 20,
            "probe": probe,
            "defaults": probed,
        },
        {"id": "d", "context": 10, "parameters": 20, "probe": None, "defaults": None},
    ]
    client = nullcontext(SimpleNamespace(models=lambda: {"data": models, "default": "a"}))
    monkeypatch.setattr(Connection, "connect", lambda _: client)
    lines = CliRunner().invoke(app, ["models"], env={"COLUMNS": "120"}).output.splitlines()[1:]
    found = [re.split(" {2,}", line.strip())[3:] for line in lines]
    settings = "temperature 0.6, strategy auto"
    assert found == [["none", settings], ["none (has a probe)", settings], ["probe", settings], ["-", "scores only"]]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("completed", "completed", "had ended before (completed), and stays as it is"),
        ("queued", "cancelled", "is cancelled, before a worker had it again"),
        ("in_progress", "in_progress", "is being cancelled: its worker ends it within an engine step"),
    ],
)
def test_cancel_says_what_happens(before: str, after: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_job(status: str) -> Job:
        return Job.model_validate(
            {"id": "job_1", "status": status, "created_at": 0.0, "spec": build_spec(problem="?").model_dump()}
        )

    client = SimpleNamespace(get=lambda _: make_job(before), cancel=lambda _: make_job(after))
    monkeypatch.setattr(Connection, "connect", lambda _: nullcontext(client))
    result = CliRunner().invoke(app, ["jobs", "cancel", "job_1", "--json"])
    assert said in result.stderr
    assert json.loads(result.stdout)["status"] == after
