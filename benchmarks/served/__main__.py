"""``python -m benchmarks.served``: our engine's server beside llama-server and vLLM, by AIPerf at growing load.

It needs AIPerf in an environment of its own. A peer that is not given or fails is left out, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine.checkpoint import SIZES, cache_folder, checkpoint
from benchmarks.engine.process import BenchError
from benchmarks.engine.running import LeftOut
from benchmarks.served.aiperf import Limits, Tool
from benchmarks.served.measure import ServedPlan, measure
from benchmarks.served.report import document, draw, markdown
from benchmarks.served.servers import LLAMA, VLLM, list_servers, split_cores

SIZE = "50M"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the report. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.served", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument("--aiperf", type=Path, required=True, help="AIPerf's program, aiperf")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="interpreter of an environment with vLLM for CPUs")
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="llama.cpp's program, llama-server")
    parser.add_argument("--streams", default="1,2,4,8,16,32", help="requests at once (%(default)s)")
    parser.add_argument("--seconds", type=int, default=10, help="of each server at each load (%(default)s)")
    parser.add_argument("--first-ms", type=float, default=2000, help="limit of the first token (%(default)g)")
    parser.add_argument("--token-ms", type=float, default=100, help="limit of the others, on average (%(default)g)")
    asked = parser.parse_args(argv)
    streams = [int(count) for count in asked.streams.split(",")]
    cores, tool_cores = split_cores(os.sched_getaffinity(0))
    folder = checkpoint(SIZE, SIZES[SIZE], cache_folder())
    plan = ServedPlan(
        servers=list_servers(folder, len(cores), max(streams), asked.vllm, asked.llama_server),
        streams=streams,
        tool=Tool(
            program=asked.aiperf.absolute(),
            tokenizer=folder,
            seconds=asked.seconds,
            limits=Limits(asked.first_ms, asked.token_ms),
            cores=tool_cores,
        ),
        cores=cores,
    )
    try:
        with tempfile.TemporaryDirectory(prefix="reasoner-served-") as made:
            served = measure(plan, Path(made), lambda line: print(line, file=sys.stderr, flush=True))
    except BenchError as error:
        print(f"benchmarks.served: {error}", file=sys.stderr)
        return 1
    absent = {VLLM: asked.vllm, LLAMA: asked.llama_server}
    served.left_out += [LeftOut(name, "", "it was not given") for name, path in absent.items() if path is None]
    told = document(plan, served, SIZE, _describe_command(asked))
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "results.json").write_text(json.dumps(told, indent=2) + "\n")
    (asked.out / "table.md").write_text(markdown(told))
    draw(told, asked.out / "chart.png")
    print(markdown(told))
    return 0


def _describe_command(asked: argparse.Namespace) -> str:
    """Return the command with names in place of this machine's paths."""
    peers = [("--vllm PYTHON", asked.vllm), ("--llama-server PATH", asked.llama_server)]
    given = [words for words, path in peers if path is not None]
    limits = f"--first-ms {asked.first_ms:g} --token-ms {asked.token_ms:g}"
    loads = f"--streams {asked.streams} --seconds {asked.seconds}"
    return " ".join(["python -m benchmarks.served --aiperf AIPERF", *given, loads, limits, f"--out {asked.out}"])


if __name__ == "__main__":
    sys.exit(main())
