"""The servers, each with the same float32 weights in the form that it runs best, and what starts and ends them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from api.roles.supervisor import free_port
from benchmarks.engine.gguf_file import gguf_file
from benchmarks.engine.measure import OURS
from benchmarks.engine.process import BenchError
from workers.processes.children import read_tail, spawn, stop

MODEL = "served"
"""The name of the model in all servers."""
CONTEXT = 512
"""Tokens that each stream has room for."""
VLLM, LLAMA = "vllm", "llama-server"
_START_SECONDS = 400.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.2
_REQUEST_SECONDS = 60.0
_PROMPT = "hello there my friend, what is it that you want"


@dataclass(frozen=True, slots=True)
class Server:
    """A server that can be started."""

    name: str
    form: str
    """How it runs the model."""
    command: tuple[str, ...]
    """``{port}`` in a word stands for the port."""
    health: str
    """The path that answers 200 once the server can be used."""
    find_version: Callable[[str], str]
    """Returns the version of the server at a URL."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def run(self, cores: Collection[int], log: Path) -> Iterator[str]:
        """Yield the URL of the server, which runs on these cores. Raises ``BenchError`` if it does not start."""
        port = str(free_port())
        url = f"http://127.0.0.1:{port}"
        try:
            with place(cores):
                process = spawn(
                    [word.replace("{port}", port) for word in self.command],
                    log=log,
                    env={**os.environ, "OMP_NUM_THREADS": str(len(cores)), **self.environment},
                    death_signal=signal.SIGTERM,
                )
        except OSError as error:
            raise BenchError(f"{Path(self.command[0]).name} cannot be started: {error.strerror}") from error
        try:
            self._await(process, url, log)
            yield url
        finally:
            stop(process, grace=_STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):  # the processes that it has left behind
                os.killpg(process.pid, signal.SIGKILL)

    def _await(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until:
            if process.poll() is not None:
                raise BenchError(f"{self.name} did not start:\n{read_tail(log)}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}{self.health}", trust_env=False, timeout=5.0).is_success:
                    return
            time.sleep(_POLL_SECONDS)
        raise BenchError(f"{self.name} was not ready after {_START_SECONDS:g} s:\n{read_tail(log)}")


def list_servers(folder: Path, threads: int, streams: int, vllm: Path | None, llama: Path | None) -> list[Server]:
    """Return our server and the given peers with the checkpoint in ``folder``: ``vllm`` is the interpreter of its
    environment, ``llama`` the program. Each takes ``streams`` requests at once.
    """
    servers = [_describe_ours(folder, threads)]
    if llama is not None:
        servers.append(_describe_llama(gguf_file(folder), threads, streams, llama))
    if vllm is not None:
        servers.append(_describe_vllm(folder, streams, vllm))
    return servers


def _describe_ours(folder: Path, threads: int) -> Server:
    command = (sys.executable, "-m", "engine.server.app", "--model", f"{MODEL}={folder}")
    options = ("--chat-template", f"{MODEL}=none", "--threads", str(threads), "--port", "{port}")
    return Server(
        name=OURS,
        form="the folder, float32 keys and values",
        command=(*command, *options),
        health="/healthz",
        find_version=lambda _: importlib.metadata.version("reasoner"),
    )


def _describe_llama(file: Path, threads: int, streams: int, program: Path) -> Server:
    size = ("--ctx-size", str(streams * CONTEXT), "--parallel", str(streams), "--threads", str(threads))
    place = ("--host", "127.0.0.1", "--port", "{port}", "--alias", MODEL)
    return Server(
        name=LLAMA,
        form="a GGUF file of type F32, float16 keys and values, its default",
        command=(str(program), "--model", str(file), *size, *place),
        health="/health",
        find_version=lambda url: _ask(f"{url}/props")["build_info"],
    )


def _describe_vllm(folder: Path, streams: int, python: Path) -> Server:
    size = ("--max-model-len", str(CONTEXT), "--max-num-seqs", str(streams))
    place = ("--host", "127.0.0.1", "--port", "{port}", "--served-model-name", MODEL)
    program = str(python.with_name("vllm"))
    # Its own binding of threads would take cores that are not its.
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return Server(
        name=VLLM,
        form="the folder, float32 keys and values, compiled by torch",
        command=(program, "serve", str(folder), "--dtype", "float32", *size, *place),
        health="/health",
        find_version=lambda url: _ask(f"{url}/version")["version"],
        environment=settings | {"HF_HUB_OFFLINE": "1"},
    )


def _ask(url: str) -> dict[str, str]:
    answer: dict[str, str] = httpx.get(url, trust_env=False, timeout=_REQUEST_SECONDS).raise_for_status().json()
    return answer


def write_greedily(url: str) -> str:
    """Return a short greedy text of the server's model. Raises ``BenchError`` if the request fails."""
    body = {"model": MODEL, "prompt": _PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=_REQUEST_SECONDS)
        return str(answer.raise_for_status().json()["choices"][0]["text"])
    except httpx.HTTPError as error:
        raise BenchError(f"the server does not answer: {error}") from error


def split_cores(allowed: Collection[int]) -> tuple[list[int], list[int]]:
    """Return the cores of the servers and those of the tool: two halves, or twice the only one."""
    cores = sorted(allowed)
    half = max(1, len(cores) // 2)
    return cores[:half], cores[half:] or cores


@contextlib.contextmanager
def place(cores: Collection[int]) -> Iterator[None]:
    """Let processes that are started in this block run on these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
