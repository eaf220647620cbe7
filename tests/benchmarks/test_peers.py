"""Peers that fail during the engine benchmark, and runs without peers; stand-in processes take the place of engines."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from gguf import GGMLQuantizationType
from typer.testing import CliRunner

from api.cli.entry.app import app
from benchmarks.engine import speculation, speculation_report
from benchmarks.engine.checkpoint import SIZES, checkpoint
from benchmarks.engine.measure import OURS, PEERS, Listener, Peer
from benchmarks.engine.process import BenchError, Worker
from benchmarks.engine.running import Systems
from benchmarks.engine.workloads import VOCAB
from benchmarks.gguf.speed import SYSTEMS, _Form
from benchmarks.search import measure as searching
from benchmarks.search import report as search_report
from tests.benchmarks.test_workloads import TINY
from tests.engine.conftest import save_random_model
from tests.engine.gguf.files import write_gguf

STAND_IN = """#!PYTHON
import json, os, sys
if sys.argv[1] != "-P":  # not a worker
    os.execv("PYTHON", ["PYTHON", *sys.argv[1:]])
system = sys.argv[4]
faults = json.loads(os.environ["STAND_IN_FAULTS"]).get(system, {})
results = {
    "load": {"seconds": 2.0, "resident_before": 0, "resident_after": 1e6},
    "greedy": [1, 2, 3],
    "ceilings": {"read": 2e10, "flops": 1e11},
    "warm_up": {},
    "run": {"tokens": 100, "seconds": 1.0 if system == "ours" else 4.0},
    "cache_hit": {"hit": 0.002, "alone": 0.001},
    "decode_step": {"seconds": 0.002, "rows": 1},
    "products": {"seconds": 0.001, "bytes": 1e6, "flops": 1e6},
}
counts = {}

def answer(call):
    counts[call] = counts.get(call, 0) + 1
    fault = faults.get(f"{call} {counts[call]}")
    if fault == "ends":
        print("Traceback (most recent call last):\\n  line\\nMemoryError: no room", file=sys.stderr, flush=True)
        os._exit(1)
    if fault == "writes":
        return "[INFO] welcome"
    if isinstance(fault, list):
        return json.dumps({"result": fault})
    if fault:
        return json.dumps({"error": f"RuntimeError: {fault}"})
    return json.dumps({"result": results[call]})

print(answer("load"), flush=True)
for line in sys.stdin:
    print(answer(json.loads(line)["call"]), flush=True)
"""


@pytest.fixture(autouse=True)
def _stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the interpreter of all workers; two peers are "installed": good and bad."""
    python = tmp_path / "python"
    python.write_text(STAND_IN.replace("PYTHON", sys.executable))
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(SIZES, "tiny", TINY)
    for name in ("good", "bad"):
        monkeypatch.setitem(PEERS, name, Peer(("torch",), name))
        monkeypatch.setitem(SYSTEMS, name, _Form(Peer(("torch",), name), "the file", of_folder=True))


def bench(*options: str, **faults: dict[str, Any]) -> Result:
    command = ["bench", "engine", "--rounds", "2", "--threads", "1", "--json", *options]
    return CliRunner().invoke(app, command, env={"STAND_IN_FAULTS": json.dumps(faults), "COLUMNS": "200"})


def read(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def speeds(document: dict[str, Any]) -> list[tuple[str, str | None, float | None]]:
    return [(row["case"].split()[0], row["peer"], row["ratio"]) for row in document["rows"]]


@pytest.mark.parametrize(
    ("fault", "measured", "stage", "reason"),
    [
        (
            {"load 1": "unknown model architecture: 'new'"},
            [],
            "tiny loads",
            "bad could not load the checkpoint: RuntimeError: unknown model architecture: 'new'",
        ),
        ({"load 1": "ends"}, [], "tiny loads", "bad ended before it could load the checkpoint: MemoryError: no room"),
        (
            {"load 1": "writes"},
            [],
            "tiny loads",
            r"bad could not load the checkpoint: its answer is b'[INFO] welcome\n'",
        ),
        ({"load 1": "\nCheck failed\nat x.cpp:1\n\x1b[31mno op"}, [], "tiny loads",
         "bad could not load the checkpoint: RuntimeError:  [31mno op"),
        ({"greedy 1": "no logits"}, [], "tiny greedy text", "bad could not greedy: RuntimeError: no logits"),
        ({"greedy 1": [1, 2, 4]}, [], "tiny loads", "it does not compute the same model: its likeliest tokens are "
         "[1, 2, 4], ours [1, 2, 3]"),
        ({"warm_up 1": "ends"}, [], "W1 tiny warm-up", "bad ended before it could warm_up: MemoryError: no room"),
        ({"run 2": "no room"}, [], "W1 tiny round 2/2", "bad could not run: RuntimeError: no room"),
        ({"warm_up 2": "no room"}, ["W1"], "W4 tiny warm-up", "bad could not warm_up: RuntimeError: no room"),
        ({"run 4": "ends"}, ["W1"], "W4 tiny round 2/2", "bad ended before it could run: MemoryError: no room"),
    ],
)  # fmt: skip
def test_a_peer_that_fails_at_any_stage_is_left_out_in_one_line_and_the_rest_goes_on(
    tmp_path: Path, fault: dict[str, Any], measured: list[str], stage: str, reason: str
) -> None:
    out = tmp_path / "out"
    result = bench("--model", "tiny", "--case", "W1,W4", "--peer", "bad,good", "--out", str(out), bad=fault)
    document = read(result)
    assert document["left_out"] == [{"peer": "bad", "stage": stage, "reason": reason}]
    line = f"bad is left out ({stage}): {reason}"
    assert [each for each in result.stderr.splitlines() if "left out" in each] == [line]
    assert line in (out / "table.md").read_text().splitlines()
    assert (out / "chart.png").exists()
    expected = [
        (case, peer, 4.0) for case in ("W1", "W4") for peer in ("bad", "good") if peer == "good" or case in measured
    ]
    assert speeds(document) == expected
    assert {case: set(runs) for case, runs in document["runs"].items()} == {
        f"{case} tiny": {"ours", "good"} | ({"bad"} if case in measured else set()) for case in ("W1", "W4")
    }


def test_a_peer_that_fails_on_one_model_is_tried_again_on_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny-2", TINY)
    document = read(bench("--model", "tiny,tiny-2", "--case", "W1", "--peer", "bad", bad={"run 1": "no room"}))
    assert [peer["stage"] for peer in document["left_out"]] == ["W1 tiny round 1/2", "W1 tiny-2 round 1/2"]
    assert speeds(document) == [("W1", None, None)] * 2


def test_ours_is_measured_alone_once_all_peers_have_failed() -> None:
    faults = {"bad": {"load 1": "ends"}, "good": {"run 3": "no room"}}
    document = read(bench("--model", "tiny", "--case", "W1,W4,cache-hit", "--peer", "bad,good", **faults))
    assert [peer["peer"] for peer in document["left_out"]] == ["bad", "good"]
    assert speeds(document) == [("W1", "good", 4.0), ("W4", None, None), ("cache-hit", "10 tokens alone", 0.5)]


@pytest.mark.parametrize("fault", ["load 1", "greedy 1", "ceilings 1", "warm_up 1", "run 2"])
def test_a_failure_of_ours_ends_the_run(fault: str) -> None:
    result = bench("--model", "tiny", "--case", "W1", "--peer", "good", ours={fault: "no room"})
    assert result.exit_code == 1
    assert "ours could not" in result.stderr
    assert "RuntimeError: no room" in result.stderr


def test_a_model_that_no_peer_computes_alike_ends_the_run_since_ours_may_be_wrong() -> None:
    result = bench("--model", "tiny", "--peer", "good,bad", good={"greedy 1": [7]}, bad={"greedy 1": [7]})
    assert result.exit_code == 1
    assert "good does not compute the same model: its likeliest tokens are [7], ours [1, 2, 3]" in result.stderr


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_none_measures_ours_alone(tmp_path: Path, weights: str) -> None:
    out = tmp_path / "out"
    options = ("--model", "tiny", "--case", "W1,W4", "--weights", weights, "--out", str(out))
    document = read(bench(*options, "--peer", " none"))
    assert document["left_out"] == []
    alone = {"metric": "generated tokens", "unit": "tokens/s", "ours": 100.0}
    alone |= {"peer": None, "peer_value": None, "ratio": None}
    assert document["rows"] == [{"case": f"{case} tiny"} | alone for case in ("W1", "W4")]
    assert document["runs"] == {f"{case} tiny": {"ours": [100.0, 100.0]} for case in ("W1", "W4")}
    table = (out / "table.md").read_text()
    assert "\nTokens per second (of the case prompt, those of the prompt):\n\n" in table
    assert "\n| case | ours |\n|---|---:|\n| W1 tiny | 100.0 |\n" in table
    assert (out / "chart.png").exists()


def test_a_table_of_ours_alone_is_printed_without_empty_columns() -> None:
    command = ["bench", "engine", "--model", "tiny", "--case", "W1,cache-hit", "--peer", "none", "--rounds", "1"]
    result = CliRunner().invoke(app, command, env={"STAND_IN_FAULTS": "{}", "COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    assert "None" not in result.stdout
    assert "how many times" not in result.stdout
    assert "10 tokens alone" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--peer", "none,good"], "none measures our engine alone: leave it or the other names out"),
        (["--peer", "good, none"], "none measures our engine alone: leave it or the other names out"),
        (["--peer", "nobody"], "there is no nobody; known are "),
        (["--peer", "nobody"], ", none"),
        (["--peer", "none", "--peer-python", "python"], "it has no effect with --peer none: leave it out"),
    ],
)
@pytest.mark.parametrize("model", ["tiny", "a/folder"])
def test_none_beside_names_is_refused(model: str, options: list[str], message: str) -> None:
    result = bench("--model", model, *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_peer_that_is_not_installed_is_left_out_and_ours_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "absent", Peer(("no-such-package",), "it by hand"))
    document = read(bench("--model", "tiny", "--case", "W1", "--peer", "absent"))
    reason = "install it by hand, or name an interpreter with --peer-python"
    assert document["left_out"] == [{"peer": "absent", "stage": "", "reason": reason}]
    assert speeds(document) == [("W1", None, None)]


def test_peers_of_other_weights_than_ours_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "good", Peer(("torch",), "good", "int8"))
    document = read(bench("--model", "tiny", "--case", "W1", "--weights", "int8", "--peer", "bad,good"))
    reason = "it is compared with our float32 weights alone"
    assert document["left_out"] == [{"peer": "bad", "stage": "", "reason": reason}]
    assert speeds(document) == [("W1", "good", 4.0)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = {"vocab_size": VOCAB.stop, "max_position_embeddings": 2048, "hidden_size": 96, "intermediate_size": 64}
    save_random_model("LlamaForCausalLM", sizes | {"tie_word_embeddings": True}, folder)
    write_gguf(folder, folder / "model.gguf", "llama", GGMLQuantizationType.Q8_0)
    return folder / "model.gguf"


@pytest.mark.parametrize(
    ("fault", "rows", "stage"),
    [
        ({"load 1": "unknown type 39"}, ["good", "good"], "loads"),
        ({"load 1": "ends"}, ["good", "good"], "loads"),
        ({"warm_up 1": "ends"}, ["good", "good"], "W1 model warm-up"),
        ({"run 4": "ends"}, ["bad", "good", "good"], "W4 model round 2/2"),
    ],
)
def test_a_peer_that_cannot_run_a_file_is_left_out_and_the_rest_goes_on(
    file: Path, tmp_path: Path, fault: dict[str, Any], rows: list[str], stage: str
) -> None:
    out = tmp_path / "out"
    options = ("--model", str(file), "--case", "W1,W4", "--peer", "bad,good", "--out", str(out))
    document = read(bench(*options, bad=fault))
    assert [(peer["peer"], peer["stage"]) for peer in document["left_out"]] == [("bad", stage)]
    assert [row["peer"] for row in document["rows"]] == rows
    assert set(document["systems"]) == ({"ours", "good"} if stage == "loads" else {"ours", "good", "bad"})
    assert f"bad is left out ({stage}): bad " in (out / "table.md").read_text()


def test_none_measures_ours_alone_on_a_file_and_on_a_folder(file: Path, tmp_path: Path) -> None:
    for model in (file, checkpoint("folder", TINY, tmp_path)):
        document = read(bench("--model", str(model), "--case", "W4", "--peer", "none"))
        assert speeds(document) == [("W4", None, None)]
        assert set(document["systems"]) == {"ours"}


def test_a_peer_that_does_not_run_folders_is_left_out_of_them_and_ours_goes_on(tmp_path: Path) -> None:
    folder = checkpoint("folder", TINY, tmp_path)
    document = read(bench("--model", str(folder), "--case", "W4", "--peer", "llama-cpp-python"))
    reason = "of the user's models it runs GGUF files only"
    assert document["left_out"] == [{"peer": "llama-cpp-python", "stage": "", "reason": reason}]
    assert speeds(document) == [("W4", None, None)]


def test_a_peer_whose_interpreter_cannot_be_run_is_left_out_and_the_others_run(tmp_path: Path) -> None:
    said: list[str] = []

    def start(python: str) -> Worker:
        return Worker("bad", tmp_path, threads=1, log=tmp_path / "log", python=python)

    with Systems(("bad",), said.append, []) as systems:
        systems.start("bad", "starts", lambda: start("/nowhere/python"))
        assert systems.workers == {}
        with pytest.raises(BenchError, match="bad could not start"):
            systems.start("ours", "starts", lambda: start("/nowhere/python"))
    [line] = said
    assert line.startswith("bad is left out (starts): bad could not start: ")


def test_a_peer_that_is_left_out_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_FAULTS", json.dumps({"bad": {"run 1": "no room"}}))
    with Systems(("bad",), lambda _: None, []) as systems:
        for name in ("ours", "bad"):
            systems.start(name, "", lambda name=name: Worker(  # type: ignore[misc]
                name, tmp_path, threads=1, log=tmp_path / name, python=sys.executable
            ))  # fmt: skip
        systems.run_each("loads", lambda _, worker: worker.ready())
        pid = systems.workers["bad"].pid
        assert set(systems.run_each("W1", lambda _, worker: worker.call("run"))) == {"ours"}
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert set(systems.run_each("W4", lambda _, worker: worker.call("run"))) == {"ours"}


class StandIn:
    """A worker of this process, which fails where ``fault`` says: the name of the system, the call, and its number."""

    fault = ("", "", 0)

    def __init__(self, system: str, _folder: Path, *, name: str, **_others: Any) -> None:
        self.system, self._name, self._calls = name, name, Counter[str]()
        self.is_closed = False

    def ready(self) -> None:
        self.call("ready")

    def close(self) -> None:
        self.is_closed = True

    def call(self, name: str, **arguments: Any) -> Any:
        assert not self.is_closed
        self._calls[name] += 1
        if self.fault == (self._name, name, self._calls[name]):
            raise BenchError(f"{self._name} could not {name}: no room")
        match name:
            case "solve":
                return {"seconds": 1.0, "texts": [[1, 2]] * len(arguments["prompts"]), "drafted": 2, "accepted": 1}
            case "scored_search":
                shape = arguments["shape"]
                generated = shape["rounds"] * shape["beams"] * shape["tokens"]
                return {"seconds": 1.0, "scoring": 0.5, "generated": generated, "computed": 2 * generated}
            case "tokenize":
                return [1, 2, 3]
        return {"read": 2e10, "flops": 1e11}


QUIET = Listener(total=lambda _: None, step=lambda _: None, say=lambda _: None)


@pytest.mark.parametrize(("call", "number"), [("ready", 1), ("scored_search", 1), ("scored_search", 3)])
def test_a_search_without_its_peer_is_measured_beside_our_own_full_scoring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    monkeypatch.setattr(searching, "Worker", StandIn)
    monkeypatch.setattr(StandIn, "fault", (searching.PLAIN, call, number))
    plan = searching.SearchPlan(cases=("W3",), model="tiny", sizes={"tiny": TINY}, rounds=3, cache=tmp_path)
    measured = searching.measure(plan, QUIET)
    assert {row.peer for row in measured.rows} == {searching.FULL, searching.RESCORING}
    assert set(measured.runs["W3 scored, tiny"]) == {OURS, searching.RESCORING}
    [out] = search_report.document(plan, measured)["left_out"]
    assert (out["peer"], out["reason"]) == (searching.PLAIN, f"{searching.PLAIN} could not {call}: no room")
    assert f"{searching.PLAIN} is left out (" in search_report.markdown(search_report.document(plan, measured), "x")
    monkeypatch.setattr(StandIn, "fault", (searching.RESCORING, call, number))
    with pytest.raises(BenchError, match="ours, scoring whole solutions could not"):
        searching.measure(plan, QUIET)


@pytest.mark.parametrize(("call", "number"), [("ready", 1), ("solve", 1), ("solve", 3)])
def test_speculation_without_a_peer_is_measured_beside_plain_decoding_and_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    monkeypatch.setattr(speculation, "Worker", StandIn)
    monkeypatch.setattr(StandIn, "fault", (speculation.ASSISTED, call, number))
    work = speculation.Work(problems={1: 2})
    plan = speculation.SpeculationPlan(cases=("batch-1",), rounds=2, work=work, cache=tmp_path)
    measured = speculation.measure(plan, QUIET)
    beside = {(row.case, row.peer) for row in measured.rows if row.unit == "tokens/s"}
    assert ("batch 1 ngram", speculation.ASSISTED) in beside  # this is prompt lookup, which ran
    assert ("batch 1 draft_model", speculation.ASSISTED) not in beside
    assert ("batch 1 draft_model", "plain") in beside
    [out] = speculation_report.document(plan, measured)["left_out"]
    assert (out["peer"], out["reason"]) == (speculation.ASSISTED, f"{speculation.ASSISTED} could not {call}: no room")
    monkeypatch.setattr(StandIn, "fault", ("draft_model", call, number))
    with pytest.raises(BenchError, match="draft_model could not"):
        speculation.measure(plan, QUIET)
