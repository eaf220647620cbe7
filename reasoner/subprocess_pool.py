"""Child processes for work that may never end: each is asked one question at a time and killed when it is late.

The usual cure, an alarm signal in the own process, works in the main thread alone and does not stop what is stuck in C
code. A child limits its own memory and, for the case that its parent dies, its time.

What a child imports takes seconds on a busy machine. So a process keeps its children, a few for each module, and all of
its jobs share them, whichever thread and event loop they run on.
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

START_PATIENCE = 60.0
"""Seconds for the child to import what it needs on a busy machine."""
MAX_LINE = 1 << 20
"""Bytes of one answer."""
SIZE = max(2, min(4, find_processors().threads))
"""Children of one module in one process."""
SHARE_SECONDS = 0.5
"""Seconds that a question waits for a child that others use before another one is started for it."""
_WAITING = 6.0
"""Times its patience that a parent waits, for a child that gets a sixth of a processor."""

_lock = threading.Lock()
_pools: list[WorkerPool] = []
_keepers = 0


@contextlib.contextmanager
def keep_workers_alive(*ahead: WorkerPool) -> Iterator[None]:
    """Keep this process's children until the outermost block ends; of the pools ``ahead`` one is started at once."""
    global _keepers
    with _lock:
        _keepers += 1
    try:
        for pool in ahead:
            pool.start_ahead()
        yield
    finally:
        with _lock:
            _keepers -= 1
            if not _keepers:
                for pool in _pools:
                    pool.close()


class Worker:
    """One process that runs ``python -m MODULE``, whose main calls ``reasoner.subprocess_worker.serve``."""

    def __init__(self, module: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    start_new_session=True,  # a Ctrl-C is the parent's to act on
                )
            except OSError:
                self._socket.close()
                raise
        self.usable = True
        """False once a question has no answer, late or given up: its answer would be taken for the next one's."""
        self._ready = False
        self._rest = b""

    async def ask(self, question: Any, patience: float) -> Any:
        """See ``TokenPool.ask``."""
        if not self._ready:
            self._ready = self.usable = await self._line(START_PATIENCE) != b""
        if not self._ready:
            return None
        self.usable = False
        line = await self._line(patience * _WAITING, json.dumps([patience, question]).encode() + b"\n")
        if not line:
            return None
        reply, last = json.loads(line)
        self.usable = not last
        return reply

    @property
    def alive(self) -> bool:
        return self.usable and self.process.poll() is None

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self._socket.close()

    async def _line(self, patience: float, message: bytes = b"") -> bytes:
        """The child's next line; empty when it does not come in time, is too long, or the child has ended."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(patience):
                if message:
                    await loop.sock_sendall(self._socket, message)
                while b"\n" not in self._rest:
                    part = await loop.sock_recv(self._socket, 1 << 16)
                    if not part or len(self._rest) + len(part) > MAX_LINE:
                        return b""
                    self._rest += part
        except (TimeoutError, ConnectionError):
            return b""
        line, _, self._rest = self._rest.partition(b"\n")
        return line


class WorkerPool:
    """A process's children of one module, at most ``SIZE``. For all threads and event loops."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._busy = 0
        self._turns: deque[Future[Worker]] = deque()
        self._ahead = False
        _pools.append(self)

    async def ask(self, question: Any, patience: float) -> Any:
        """A child's answer; ``None`` when it was late or died, and another child takes its place.

        ``patience``: seconds of processor time, so that a busy machine does not change what is late. Cancelling this
        ends the child, which would go on otherwise.
        """
        with keep_workers_alive():
            child = await self._take()
            try:
                return await child.ask(question, patience)
            finally:
                self._give_back(child)

    def start_ahead(self) -> None:
        """Start a child now, and from now on another one whenever the last one has ended."""
        with self._lock:
            self._ahead = True
            self._refill()

    def close(self) -> None:
        """End the children; nobody may be asking."""
        with self._lock:
            self._ahead = False
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()

    @property
    def children(self) -> list[Worker]:
        """Children that nobody is asking."""
        return list(self._idle)

    async def _take(self) -> Worker:
        """A child for one question, in the order of asking."""
        turn: Future[Worker] = Future()
        with self._lock:
            self._turns.append(turn)
            self._deal(most=max(1, self._busy))
        waiting = asyncio.wrap_future(turn)
        try:
            await asyncio.wait({waiting}, timeout=SHARE_SECONDS)
            if not waiting.done():
                with self._lock:
                    self._deal(most=SIZE)
            return await waiting
        except BaseException:
            if not turn.cancel():
                self._give_back(turn.result())
            raise

    def _give_back(self, child: Worker) -> None:
        ended = None
        with self._lock:
            busy, self._busy = self._busy, self._busy - 1
            if child.alive:
                self._idle.append(child)
            else:
                ended = child
            self._deal(most=busy)
            self._refill()
        if ended is not None:
            ended.close()

    def _deal(self, most: int) -> None:
        """Give those whose turn it is a child, started for them as long as fewer than ``most`` are busy."""
        while self._turns and (self._idle or self._busy < most):
            turn = self._turns.popleft()
            if not turn.set_running_or_notify_cancel():  # nobody waits for it any more
                continue
            try:
                child = self._next()
            except OSError as error:
                turn.set_exception(error)
            else:
                self._busy += 1
                turn.set_result(child)

    def _next(self) -> Worker:
        while self._idle:
            child = self._idle.pop()
            if child.alive:
                return child
            child.close()
        return Worker(self._module)

    def _refill(self) -> None:
        if self._ahead and not self._idle and not self._busy:
            self._idle.append(Worker(self._module))
