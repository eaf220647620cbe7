"""``python -m benchmarks.gpu``: run the GPU's tests and timings in stages, and write what they print.

It needs torch, triton, transformers, numba, gguf, hypothesis, and pytest with xdist and timeout. A stage that has
passed is not run again, so that an interrupted run goes on where it was.
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

_PYTEST = ("-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-W", "ignore", "-q")
"""Without the project's options, which ask for plugins that such a machine lacks."""

_ENGINE_TESTS = tuple(
    f"tests/engine/{path}.py"
    for path in ("attention/test_cuda_triton", "runner/test_gpu_engine", "quantization/test_gpu")
)


@dataclass(frozen=True)
class Command:
    """A command of a stage."""

    title: str
    arguments: tuple[str, ...]
    """Arguments of Python."""
    seconds: float
    """Time after which it is stopped and counts as failed."""


def _tests(title: str, *arguments: str) -> Command:
    return Command(title, (*_PYTEST, "--timeout", "120", "--tb", "short", *arguments), 240)


def _steps(title: str, *arguments: str) -> Command:
    return Command(title, ("-m", "benchmarks.gpu.decode", *arguments), 150)


STAGES: dict[str, tuple[Command, ...]] = {
    "correctness": (
        _tests("kernels beside float64", "tests/kernels/triton/interpreted", "-n", "8"),
        _tests("engine beside the CPU", "-m", "gpu", "-n", "8", *_ENGINE_TESTS),
    ),
    "engine": (
        _steps("16-bit weights", "1:2048", "16:2048", "64:2048", "64:2048:1024", "64:2048:64"),
        _steps("4-bit weights", "--int4", "1:2048", "16:2048", "64:2048"),
        _steps("keys of 8 bits", "--kv", "fp8", "256:2048"),
    ),
    "kernels": tuple(
        Command(suite, ("-m", "benchmarks.kernels", suite, "--rounds", "3", "--out", f"{{out}}/{suite}"), 240)
        for suite in ("attention", "linear", "sampling", "norm", "step")
    ),
    "cascade": (Command("shared prefixes", ("-m", "benchmarks.gpu.cascade", "--out", "{out}/cascade.json"), 150),),
    "cold-start": (
        Command("empty cache of kernels", ("-m", "benchmarks.gpu.cold_start", "--cache", "{out}/cache"), 150),
        Command("filled cache of kernels", ("-m", "benchmarks.gpu.cold_start", "--cache", "{out}/cache"), 150),
    ),
}


def main() -> int:
    """Run the stages; return the exit status, 1 without a GPU or if a command failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"one of {', '.join(STAGES)} (all)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"), help="folder of the results")
    arguments = parser.parse_args()
    if unknown := set(arguments.stages) - set(STAGES):
        parser.error(f"there is no stage {min(unknown)!r}; there are {', '.join(STAGES)}")
    if not torch.cuda.is_available():
        print("there is no CUDA device, on which these stages run", file=sys.stderr)
        return 1
    folder: Path = arguments.out / torch.cuda.get_device_name().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machine.txt").write_text(describe_machine(), encoding="utf-8")
    passed = {name: run_stage(name, folder) for name in arguments.stages or STAGES}
    for name, has_passed in passed.items():
        print(f"{'passed' if has_passed else 'FAILED'}: {name} ({folder / name}.txt)")
    return 0 if all(passed.values()) else 1


def describe_machine() -> str:
    """Return the name, memory and driver of the GPU, and the versions of torch and Triton."""
    import triton

    about = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    return (
        f"{about.name}, {about.total_memory / 2**30:.1f} GiB, {about.multi_processor_count} multiprocessors; "
        f"driver and highest clocks: {driver or 'unknown'}; "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}\n"
    )


def run_stage(name: str, folder: Path) -> bool:
    """Run a stage's commands, whose output is shown and written to ``NAME.txt``; return True if all passed.

    A stage that has passed before is left as it is.
    """
    log, partial = folder / f"{name}.txt", folder / f"{name}.partial.txt"
    if log.exists():
        return True
    partial.write_text("", encoding="utf-8")
    failed = False
    for command in STAGES[name]:
        print(f"{name}: {command.title}", file=sys.stderr, flush=True)
        output, status, seconds = run_command(command, folder)
        text = f"## {command.title}\n\n{output.strip()}\n\n{status} after {seconds:.0f} s\n\n"
        print(text, flush=True)
        with partial.open("a", encoding="utf-8") as file:
            file.write(text)
        failed |= status != "passed"
    if not failed:
        partial.rename(log)
    return not failed


def run_command(command: Command, folder: Path) -> tuple[str, str, float]:
    """Run a command; return its output, ``passed`` or the way it failed, and its seconds."""
    arguments = [argument.replace("{out}", str(folder)) for argument in command.arguments]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | {"REASONER_TEST_DEVICE": "cuda"},  # of tests that else run in Triton's interpreter
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(command.seconds)
            status = "failed" if code else "passed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = "stopped, being too slow,"
        output.seek(0)
        return output.read(), status, time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main())
