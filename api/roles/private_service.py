"""A private service or engine for the duration of a command; nothing of it remains afterwards."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import httpx
from rich.console import Console

from api.roles.supervisor import Supervisor, engine_command, free_port
from workers.broker.embedded import socket_path
from workers.config.model_folders import check_models
from workers.config.settings import Settings
from workers.config.types import require_model_folder, served_name
from workers.processes.children import StartError, make_private_folder, read_tail, spawn, stop
from workers.processes.shutdown import uninterrupted

_POLL_SECONDS = 0.1
_STOP_SECONDS = 10.0


@contextlib.contextmanager
def run_private_service(settings: Settings, console: Console) -> Iterator[str]:
    """Start API, worker, engine and broker in a temporary folder and on a free port; yield the API's URL.

    A configured engine is used; everything else is private. Raises ``StartError`` and ``ConfigError``.
    """
    folder = Path(tempfile.mkdtemp(prefix="reasoner-"))
    own = settings.model_copy(
        update={"data_dir": folder, "host": "127.0.0.1", "port": free_port(), "redis_url": None, "api_keys": ()}
    )
    with contextlib.ExitStack() as running:
        with console.status("starting") as status:
            stack = running.enter_context(Supervisor(own, log_dir=folder, on_progress=status.update, ephemeral=True))
        yield stack.url


@contextlib.contextmanager
def run_private_engine(
    settings: Settings, console: Console, more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[str, ...]]:
    """Yield the URLs of the configured engines, or of an engine started for this purpose behind a Unix socket.

    ``more``: models besides the policy and the verifier, with the option that names each; a configured engine must
    serve them. Raises ``StartError`` and ``ConfigError``.
    """
    check_models(settings)
    if not settings.has_local_engine:
        yield settings.engine_addresses
        return
    folder = Path(tempfile.mkdtemp(prefix="reasoner-"))
    address, log = socket_path(folder).with_name("engine.sock"), folder / "engine.log"
    try:
        make_private_folder(address.parent)
        command = engine_command(settings, ["--uds", str(address)])
        for value, option in more.items():
            command += ["--model", f"{served_name(value)}={require_model_folder(value, option)}"]
        command += settings.chat_template_options({*map(served_name, more)} - settings.local_models().keys())
        process = spawn(command, log=log, death_signal=signal.SIGKILL)
        try:
            with console.status("starting the engine"):
                _await_engine(process, address, log)
            yield (f"unix://{address}",)
        finally:
            with uninterrupted():
                stop(process, grace=_STOP_SECONDS)
    finally:
        with uninterrupted():
            for made in (address.parent, folder):
                shutil.rmtree(made, ignore_errors=True)


def _await_engine(process: subprocess.Popen[bytes], address: Path, log: Path) -> None:
    transport = httpx.HTTPTransport(uds=str(address), verify=False)
    with httpx.Client(transport=transport, base_url="http://engine", timeout=5.0, trust_env=False) as client:
        while True:
            if process.poll() is not None:
                raise StartError(f"the engine did not start:\n{read_tail(log)}")
            with contextlib.suppress(httpx.TransportError):
                if client.get("/healthz").is_success:
                    return
            time.sleep(_POLL_SECONDS)
