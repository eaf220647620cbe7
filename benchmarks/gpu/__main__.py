"""``python -m benchmarks.gpu``: run the GPU's tests and timings in stages, and write what they print.

It needs torch, triton, transformers, numba, gguf and pytest; the project itself need not be installed. A stage that has
passed is not run again, so that an interrupted run goes on where it was. With ``--dry-run`` every stage runs at tiny
sizes on a machine without a GPU: kernels in Triton's interpreter or as their references, graphs emulated.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

_PYTEST = (
    *("-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.shard"),
    *("-W", "ignore", "-q", "--tb", "short", "-o", "faulthandler_timeout=120"),
)
"""Without the project's options, which ask for plugins that such a machine lacks."""
_SHARDS = 8
"""Processes of tests at once."""
_ENGINE_TESTS = tuple(
    f"tests/engine/{path}.py"
    for path in (
        "attention/test_cuda_triton",
        "runner/test_gpu_engine",
        "quantization/test_gpu",
    )
)
PEER_PYTHON = "REASONER_PEER_PYTHON"
"""Variable that names the interpreter of the searches' peer."""
DRY_RUN = "dry-run"
"""Folder of what a dry run writes."""


@dataclass(frozen=True)
class Command:
    """A command of a stage."""

    title: str
    arguments: tuple[str, ...]
    """Arguments of Python. ``{out}`` is the folder of the results."""
    seconds: float
    """Time after which it is stopped and counts as failed."""
    dry: tuple[str, ...]
    """Arguments in a dry run."""
    shards: int = 1
    """Number of processes that share its tests."""


def _tests(title: str, *arguments: str) -> Command:
    dry = ("-m", "not long") if "-m" not in arguments else ()
    return Command(title, (*_PYTEST, *arguments), 250, (*_PYTEST, *arguments, *dry), _SHARDS)


def _module(title: str, name: str, *arguments: str, seconds: float, dry: tuple[str, ...]) -> Command:
    """Return a command that runs a module, in a dry run with other arguments."""
    return Command(title, ("-m", name, *arguments), seconds, ("-m", name, *dry))


def _steps(title: str, *cases: str, options: tuple[str, ...] = ()) -> Command:
    dry = ("--tiny", *options, "3:64", "2:96:32")
    return _module(title, "benchmarks.gpu.decode", *options, *cases, seconds=150, dry=dry)


def _kernels(suite: str) -> Command:
    arguments = suite, "--out", f"{{out}}/{suite}", "--rounds"
    return _module(suite, "benchmarks.kernels", *arguments, "3", seconds=100, dry=(*arguments, "1", "--dry-run"))


def _cascade() -> Command:
    arguments = "--out", "{out}/cascade.json", "--rounds"
    dry = (*arguments, "1", "--dry-run")
    return _module("shared prefixes", "benchmarks.gpu.cascade", *arguments, "3", seconds=150, dry=dry)


def _cold_start(title: str) -> Command:
    arguments = "--cache", "{out}/cache"
    return _module(title, "benchmarks.gpu.cold_start", *arguments, seconds=150, dry=(*arguments, "--tiny"))


def _table(title: str, name: str, *arguments: str, seconds: float) -> Command:
    """Return a command whose module writes a table named as it is."""
    out = ("--out", f"{{out}}/{name}.md")
    return _module(title, f"benchmarks.gpu.{name}", *arguments, *out, seconds=seconds, dry=("--tiny", *out))


STAGES: dict[str, tuple[Command, ...]] = {
    "correctness": (
        _tests("kernels beside float64", "tests/kernels/triton/interpreted"),
        _tests("engine beside the CPU", "-m", "gpu", *_ENGINE_TESTS),
    ),
    "engine": (
        _table("weights of 16, 8 and 4 bits", "rates", seconds=200),
        _steps("shared prefixes", "64:2048:1024", "64:2048:64"),
        _steps("keys of 8 bits", "256:2048", options=("--kv", "fp8")),
    ),
    "speculation": (_table("EAGLE-3 beside plain decoding", "speculate", seconds=400),),
    "search": (_table("best-of-N and trees", "search", seconds=500),),
    "kernels": tuple(map(_kernels, ("attention", "linear", "sampling", "norm", "step"))),
    "recurrent": (
        _kernels("recurrent"),
        _steps("delta rule and attention", "1:2048", "16:2048", "64:2048", "64:2048:1024", options=("--hybrid",)),
    ),
    "cascade": (_cascade(),),
    "cold-start": (_cold_start("empty cache of kernels"), _cold_start("filled cache of kernels")),
}
"""Each takes less than nine minutes, even if its commands are stopped for being slow."""


def main(argv: list[str] | None = None) -> int:
    """Run the stages; return the exit status, 1 without a GPU or if a command failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"one of {', '.join(STAGES)} (all)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"), help="folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes without a GPU, to try the stages themselves")
    parser.add_argument("--peer-python", help="an interpreter that can import vLLM, which then runs the searches, too")
    arguments = parser.parse_args(argv)
    if arguments.peer_python:
        os.environ[PEER_PYTHON] = arguments.peer_python  # for the stage's own process
    if unknown := set(arguments.stages) - set(STAGES):
        parser.error(f"there is no stage {min(unknown)!r}; there are {', '.join(STAGES)}")
    if not arguments.dry_run and not torch.cuda.is_available():
        print("there is no CUDA device, on which these stages run", file=sys.stderr)
        return 1
    name = DRY_RUN if arguments.dry_run else torch.cuda.get_device_name().replace(" ", "-")
    folder: Path = arguments.out / name
    folder.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    (folder / "machine.txt").write_text(machine, encoding="utf-8")
    passed = {}
    for stage in arguments.stages or STAGES:
        passed[stage] = run_stage(stage, folder, machine, is_dry=arguments.dry_run)
        print(f"{'green' if passed[stage] else 'RED'}: {stage}", file=sys.stderr, flush=True)
    summary = summarize(passed, folder, machine)
    (folder / "summary.txt").write_text(summary, encoding="utf-8")
    print(summary, end="")
    return 0 if all(passed.values()) else 1


def summarize(passed: dict[str, bool], folder: Path, machine: str) -> str:
    """Return the outcome, red or green first, and the files of the stages."""
    failed = [stage for stage, has_passed in passed.items() if not has_passed]
    lines = [f"RED: {', '.join(failed)} failed" if failed else f"green: {', '.join(passed)} passed", machine.rstrip()]
    for stage, has_passed in passed.items():
        lines.append(f"{'passed' if has_passed else 'FAILED'}: {folder / stage}{'' if has_passed else '.partial'}.txt")
    return "\n".join(lines) + "\n"


def describe_machine() -> str:
    """Return the name, memory and driver of the GPU, if there is one, and the versions of torch and Triton."""
    import triton

    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}\n"
    if not torch.cuda.is_available():
        return f"no GPU: a dry run, whose times mean nothing; {versions}"
    about = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    return (
        f"{about.name}, {about.total_memory / 2**30:.1f} GiB, {about.multi_processor_count} multiprocessors; "
        f"driver and highest clocks: {driver or 'unknown'}; {versions}"
    )


def run_stage(name: str, folder: Path, machine: str, *, is_dry: bool = False) -> bool:
    """Run a stage's commands, whose output is shown and written to ``NAME.txt``; return True if all passed.

    A stage that has passed before is left as it is.
    """
    log, partial = folder / f"{name}.txt", folder / f"{name}.partial.txt"
    if log.exists():
        return True
    partial.write_text(machine + "\n", encoding="utf-8")
    failed = False
    for command in STAGES[name]:
        print(f"{name}: {command.title}", file=sys.stderr, flush=True)
        output, status, seconds = run_command(command, folder, is_dry=is_dry)
        text = f"## {command.title}\n\n{output.strip()}\n\n{status} after {seconds:.0f} s\n\n"
        print(text, flush=True)
        with partial.open("a", encoding="utf-8") as file:
            file.write(text)
        failed |= status != "passed"
    if not failed:
        partial.rename(log)
    return not failed


def run_command(command: Command, folder: Path, *, is_dry: bool = False) -> tuple[str, str, float]:
    """Run a command; return its output, ``passed`` or the way it failed, and its seconds."""
    given = command.dry if is_dry else command.arguments
    arguments = [argument.replace("{out}", str(folder)) for argument in given]
    # Tests of kernels run on this device; on "cpu" in Triton's interpreter.
    environment = os.environ | {"REASONER_TEST_DEVICE": "cpu" if is_dry else "cuda", "PYTHONPATH": os.getcwd()}
    start = time.monotonic()
    status, outputs = "passed", []
    with tempfile.TemporaryDirectory() as logs:
        paths = [Path(logs, str(shard)) for shard in range(command.shards)]
        processes = []
        for shard, path in enumerate(paths):
            with path.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *arguments],
                        env=environment | {"REASONER_TEST_SHARD": f"{shard}/{command.shards}"},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        for process, path in zip(processes, paths, strict=True):
            try:
                if process.wait(max(0.0, start + command.seconds - time.monotonic())) and status == "passed":
                    status = "failed"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = "stopped, being too slow,"
            outputs.append(path.read_text(encoding="utf-8", errors="replace").strip())
    return "\n\n".join(outputs), status, time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main())
