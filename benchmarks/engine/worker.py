"""The process of one system: loads the checkpoint, then answers calls until its standard input ends.

A call is a JSON line ``{"call": NAME, "arguments": {…}}``, its answer ``{"result": …}`` or ``{"error": …}``; a first
answer, when the system is loaded, has the seconds that this took and the memory before and after. Between calls the
process is blocked.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TextIO

from benchmarks.engine import problems, workloads
from benchmarks.engine.process import resident_bytes

_SYSTEMS = "benchmarks.engine.systems"
MODULES = {
    "ours": f"{_SYSTEMS}.ours",
    "constrained": f"{_SYSTEMS}.constrained",
    "transformers": f"{_SYSTEMS}.transformers",
    "transformers-cb": f"{_SYSTEMS}.transformers_cb",
    "openvino-genai": f"{_SYSTEMS}.openvino_genai",
    "llama-cpp-python": f"{_SYSTEMS}.llama_cpp",
    "llama.cpp": f"{_SYSTEMS}.llama_programs",
    "vllm": f"{_SYSTEMS}.vllm",
    "speculative": f"{_SYSTEMS}.speculative",
    "transformers-assisted": f"{_SYSTEMS}.transformers_assisted",
    "search": "benchmarks.search.ours",
    "search-transformers": "benchmarks.search.plain",
}
"""Modules that drive the systems, by name."""
_PRODUCTS_SECONDS = 120.0


def main() -> None:
    """Run the worker. Arguments: the system, the checkpoint's folder, the number of threads, the system's options as
    JSON.
    """
    name, folder, threads, options = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    answers = _private_output()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    loaded: list[Any] = []
    answer = _answer(lambda: _load(loaded, name, folder, threads, options))
    gc.freeze()  # as the engine's server does
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        call = json.loads(lines.get())
        answer = _answer(lambda call=call: _call(loaded[0], folder, call["call"], call["arguments"]))  # type: ignore[misc]


def _load(loaded: list[Any], name: str, folder: Path, threads: int, options: dict[str, Any]) -> dict[str, float | None]:
    module = importlib.import_module(MODULES[name])
    before, start = resident_bytes(), time.perf_counter()
    loaded.append(module.load(folder, threads, **options))
    seconds = time.perf_counter() - start
    gc.collect()
    return {"seconds": seconds, "resident_before": before, "resident_after": resident_bytes()}


def _call(system: Any, folder: Path, name: str, arguments: dict[str, Any]) -> Any:
    if name in ("products", "ceilings", "loaded_bytes"):
        from benchmarks.engine import products

        # In a process of its own, because arithmetic on a second thread would slow the engine's permanently.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            function = getattr(products, name)
            work = function if name == "ceilings" else partial(function, folder)
            return pool.submit(work, **arguments).result(timeout=_PRODUCTS_SECONDS)
    if name in ("tokenize", "imitate", "scored_search", "beam_jobs", "constrained_step", "grammar_times"):
        return getattr(system, name)(**arguments)
    if name in ("solve", "best_of", "search"):
        return problems.call(system, name, **arguments)
    timed: dict[str, Callable[..., Any]] = {
        "run": workloads.run,
        "warm_up": workloads.warm_up,
        "greedy": workloads.greedy,
        "cache_hit": workloads.cache_hit,
        "decode_step": workloads.decode_step,
        "decode": workloads.decode,
    }
    return timed[name](system=system, **arguments)


def _answer(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"result": work()}
    except Exception as error:  # the parent reports any error of an engine
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _private_output() -> TextIO:
    """Reserve standard output for answers; output of libraries goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _listen(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # the parent has ended: end at once, whatever a library is doing
