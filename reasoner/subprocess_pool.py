"""Pools of worker processes for calls that may never return: a worker takes one request at a time, killed when late.

An alarm signal in this process would work in the main thread only and cannot interrupt C code. A worker limits its own
memory and, in case its parent dies, its time.

The imports of a worker take seconds on a busy machine. So a process keeps its workers, a few per module, and all of its
jobs share them, on any thread and event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from engine.threads.processors import find_processors

START_SECONDS = 60.0
"""Maximum time for a worker's imports on a busy machine."""
MAX_LINE_BYTES = 1 << 20
"""Maximum size of one reply."""
MAX_WORKERS = max(2, min(4, find_processors().threads))
"""Maximum number of workers of one module in one process."""
SHARE_SECONDS = 0.5
"""Time that a request waits for a busy worker before another one is started."""
_WALL_PER_CPU_SECOND = 6.0
"""Wall-clock seconds that the parent waits per second of processor time: the worker may get a sixth of a processor."""

_lock = threading.Lock()
_pools: list[WorkerPool] = []
_num_keepers = 0


@contextlib.contextmanager
def keep_workers_alive(*prestarted: WorkerPool) -> Iterator[None]:
    """Keep idle workers until the outermost block ends; each ``prestarted`` pool starts one worker at once."""
    global _num_keepers
    with _lock:
        _num_keepers += 1
    try:
        for pool in prestarted:
            pool.prestart()
        yield
    finally:
        with _lock:
            _num_keepers -= 1
            if not _num_keepers:
                for pool in _pools:
                    pool.close()


class Worker:
    """A process that runs ``python -m MODULE``, whose main calls ``reasoner.subprocess_worker.serve``."""

    def __init__(self, module: str) -> None:
        self._socket, worker_socket = socket.socketpair()
        self._socket.setblocking(False)
        with worker_socket:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module],
                    stdin=worker_socket.fileno(),
                    stdout=worker_socket.fileno(),
                    start_new_session=True,  # only the parent reacts to Ctrl-C
                )
            except OSError:
                self._socket.close()
                raise
        self.is_usable = True
        """False after a request without a reply: a late reply would be taken for the next request's."""
        self._ready = False
        self._buffer = b""

    async def call(self, request: Any, cpu_seconds: float) -> Any:
        if not self._ready:
            self._ready = self.is_usable = await self._exchange_line(START_SECONDS) != b""
        if not self._ready:
            return None
        self.is_usable = False
        line = await self._exchange_line(
            cpu_seconds * _WALL_PER_CPU_SECOND, json.dumps([cpu_seconds, request]).encode() + b"\n"
        )
        if not line:
            return None
        reply, exits = json.loads(line)
        self.is_usable = not exits
        return reply

    @property
    def is_alive(self) -> bool:
        return self.is_usable and self.process.poll() is None

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self._socket.close()

    async def _exchange_line(self, timeout_seconds: float, message: bytes = b"") -> bytes:
        """Send a message and return the worker's next line; empty if it is late, too long or missing."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_seconds):
                if message:
                    await loop.sock_sendall(self._socket, message)
                while b"\n" not in self._buffer:
                    part = await loop.sock_recv(self._socket, 1 << 16)
                    if not part or len(self._buffer) + len(part) > MAX_LINE_BYTES:
                        return b""
                    self._buffer += part
        except (TimeoutError, ConnectionError):
            return b""
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


class WorkerPool:
    """The workers of one module, at most ``MAX_WORKERS``, shared by all threads and event loops."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._num_busy = 0
        self._waiters: deque[Future[Worker]] = deque()
        self._keeps_one_started = False
        _pools.append(self)

    async def call(self, request: Any, cpu_seconds: float) -> Any:
        """Return a worker's reply; ``None`` if the worker was late or died, and is replaced.

        The limit is processor time, so that load on the machine does not change which requests are late. Cancelling
        the call ends the worker.
        """
        with keep_workers_alive():
            worker = await self._take_worker()
            try:
                return await worker.call(request, cpu_seconds)
            finally:
                self._give_back(worker)

    def prestart(self) -> None:
        """Start a worker now, and another one whenever the last one has ended."""
        with self._lock:
            self._keeps_one_started = True
            self._refill()

    def close(self) -> None:
        """End the idle workers; no call may be running."""
        with self._lock:
            self._keeps_one_started = False
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()

    @property
    def idle_workers(self) -> list[Worker]:
        """Workers without a request."""
        return list(self._idle)

    async def _take_worker(self) -> Worker:
        """Return a worker for one request, first come, first served."""
        waiter: Future[Worker] = Future()
        with self._lock:
            self._waiters.append(waiter)
            self._assign(max_busy=max(1, self._num_busy))
        assigned = asyncio.wrap_future(waiter)
        try:
            await asyncio.wait({assigned}, timeout=SHARE_SECONDS)
            if not assigned.done():
                with self._lock:
                    self._assign(max_busy=MAX_WORKERS)
            return await assigned
        except BaseException:
            if not waiter.cancel():
                self._give_back(waiter.result())
            raise

    def _give_back(self, worker: Worker) -> None:
        ended = None
        with self._lock:
            num_busy, self._num_busy = self._num_busy, self._num_busy - 1
            if worker.is_alive:
                self._idle.append(worker)
            else:
                ended = worker
            self._assign(max_busy=num_busy)
            self._refill()
        if ended is not None:
            ended.close()

    def _assign(self, max_busy: int) -> None:
        """Assign workers to waiting calls, and start new ones while fewer than ``max_busy`` are busy."""
        while self._waiters and (self._idle or self._num_busy < max_busy):
            waiter = self._waiters.popleft()
            if not waiter.set_running_or_notify_cancel():  # its call was cancelled
                continue
            try:
                worker = self._next_worker()
            except OSError as error:
                waiter.set_exception(error)
            else:
                self._num_busy += 1
                waiter.set_result(worker)

    def _next_worker(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            worker.close()
        return Worker(self._module)

    def _refill(self) -> None:
        if self._keeps_one_started and not self._idle and not self._num_busy:
            self._idle.append(Worker(self._module))
