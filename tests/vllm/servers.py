"""vLLM as a process that tests start, kill and start again, and the service on it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from api.roles.supervisor import free_port
from tests.chaos.processes import until
from tests.vllm.computing import skip_unless_it_computes
from workers.processes.children import read_tail

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / os.environ.get("VLLM_ENVIRONMENT", "build/vllm")
"""The virtual environment with vLLM, which must not share ours: it pins another torch."""
POLICY = ROOT / "reasoner" / "bundled" / "policy"
PRM = ROOT / "reasoner" / "bundled" / "prm"
START_SECONDS = 400.0
VLLM_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # Several servers with spinning threads on few cores make each other many times slower.
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
}
_POLICY_OPTIONS = ("--enable-prefix-caching", "--max-num-seqs", "64", "--enable-prompt-tokens-details")
_ALL = ("--runner", "pooling", "--pooler-config", '{"pooling_type": "ALL"}')
_LAST = (
    *("--runner", "pooling", "--enable-prefix-caching", "--pooler-config", '{"pooling_type": "LAST"}'),
    *("--hf-overrides", '{"architectures": ["Qwen3ForSequenceClassification"]}'),
)


class Server:
    """A process that serves HTTP. ``start`` returns at once, ``wait`` when it answers."""

    def __init__(self, log: Path, command: Sequence[str], port: int, settings: Mapping[str, str], health: str) -> None:
        """``health``: the path that answers 200 once the server can be used."""
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        self._command = list(command)
        self._settings = dict(settings)
        self._health = health
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=os.environ | self._settings, start_new_session=True
            )

    def wait(self) -> None:
        name = Path(self._command[0]).name
        until(self._answers, f"{name} answers; the end of its log:\n{read_tail(self.log, 30)}", START_SECONDS)

    def check(self) -> None:
        """Skip the test if the server does not compute its model, where that can be found out."""

    def kill(self) -> None:
        """Kill the server and the processes that it has started."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, read_tail(self.log, 40)
        try:
            return httpx.get(f"{self.url}{self._health}", timeout=5).is_success
        except httpx.TransportError:
            return False


class Vllm(Server):
    """One vLLM server."""

    def __init__(self, log: Path, model: Path, name: str, *options: str) -> None:
        self.model = model
        self._name = name
        self._key = options[options.index("--api-key") + 1] if "--api-key" in options else None
        self._writes = "pooling" not in options
        port = free_port()
        common = ("--served-model-name", name, "--dtype", "float32", "--enforce-eager", "--block-size", "32")
        place = ("--host", "127.0.0.1", "--port", str(port))
        command = [str(ENVIRONMENT / "bin" / "vllm"), "serve", str(model), *common, *options, *place]
        super().__init__(log, command, port, VLLM_SETTINGS, "/health")

    @classmethod
    def policy(cls, log: Path, *options: str, model: Path = POLICY) -> Self:
        return cls(log, model, "policy", *_POLICY_OPTIONS, *options)

    @classmethod
    def prm(cls, log: Path, *, last: bool) -> Self:
        """``last``: score the last token, which reads cached prefixes, and not every token."""
        return cls(log, PRM, "prm", *(_LAST if last else _ALL))

    def check(self) -> None:
        if self._writes:
            skip_unless_it_computes(self.url, self._name, self.model, api_key=self._key)

    def metric(self, name: str, label: str = "") -> float:
        """Return the sum of a metric's values, those with a label of this value."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        pattern = rf"^{re.escape(name)}(?:{{[^}}]*{label}[^}}]*}})? (\S+)$"
        values = re.findall(pattern, text, re.MULTILINE)
        assert values, f"there is no metric {name}"
        return sum(map(float, values))


@dataclass(frozen=True)
class Servers:
    """A policy and a PRM, each on a vLLM of its own."""

    policy: Vllm
    last: Vllm

    @property
    def settings(self) -> dict[str, str]:
        """The environment of a service on these servers."""
        return {
            "REASONER_ENGINE_URL": self.policy.url,
            "REASONER_MODEL": "policy",
            "REASONER_ENGINE_TOKENIZER": str(self.policy.model),
            "REASONER_PRM": "prm",
            "REASONER_PRM_URL": self.last.url,
            "REASONER_PRM_TOKENIZER": str(PRM),
        }


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Run servers; they start side by side. Skips the test if one does not compute its model."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        for server in servers:
            server.check()
        yield
    finally:
        for server in servers:
            server.kill()


class Service:
    """A running service."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self.log = log
        self._http = httpx.Client(base_url=url, timeout=200)

    def submit(self, problem: str, *, wait: int = 0, **spec: Any) -> dict[str, Any]:
        headers = {"Prefer": f"wait={wait}"} if wait else {}
        answer: dict[str, Any] = self._http.post("/v1/jobs", json={"problem": problem} | spec, headers=headers).json()
        return answer

    def get(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.get(path).json()
        return answer

    def cancel(self, job: str) -> None:
        self._http.post(f"/v1/jobs/{job}/cancel").raise_for_status()

    def close(self) -> None:
        self._http.close()

    def until(self, job: str, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Return the job once the condition holds."""

        def check() -> dict[str, Any] | None:
            state = self.get(f"/v1/jobs/{job}")
            return state if condition(state) else None

        return until(check, what, 180.0)

    def is_ready(self) -> bool:
        try:
            return self._http.get("/readyz").is_success
        except httpx.TransportError:
            return False


@contextmanager
def serving(
    folder: Path, settings: Mapping[str, str], configuration: str = "", *, ready: bool = True
) -> Iterator[Service]:
    """Run ``reasoner serve`` in ``folder``, where ``configuration`` becomes its ``reasoner.toml``.

    ``ready``: wait until it is; otherwise until it answers.
    """
    folder.mkdir(exist_ok=True)
    if configuration:
        (folder / "reasoner.toml").write_text(configuration)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REASONER_")}
    environment |= {"PYTHONPATH": str(ROOT), **settings}
    port = free_port()
    service = Service(f"http://127.0.0.1:{port}", folder / "log")
    with service.log.open("wb") as log:
        command = [sys.executable, "-m", "api.cli.main", "serve", "--port", str(port)]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        until(service.is_ready if ready else lambda: _is_alive(service.url), "the service answers", 120.0)
        yield service
    except BaseException as error:
        error.add_note(read_tail(service.log, 30))
        raise
    finally:
        service.close()
        process.terminate()
        process.wait(60)


def _is_alive(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=5).is_success
    except httpx.TransportError:
        return False
