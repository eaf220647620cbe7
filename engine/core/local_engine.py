"""The engine in this process: one thread steps the models for any number of event loops."""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.core.engine_core import EngineCore
from engine.core.event_queue import EventQueue
from engine.core.gpu_memory import GpuMemory
from engine.core.load_errors import name_checkpoint
from engine.core.model_setup import ModelWeights
from engine.core.stats import CoreStats
from engine.gguf.folder import open_checkpoint
from engine.protocol.options import EngineOptions
from engine.protocol.request_checks import has_ids
from engine.protocol.types import (
    Completion,
    Delta,
    EngineBusy,
    EngineError,
    EngineUnavailable,
    Events,
    GenerateRequest,
    InvalidRequest,
    ModelInfo,
    ScoreRequest,
    ScoreResult,
    TokenIds,
    TokenizeRequest,
    Tokens,
)
from engine.scheduler.sequence import Request
from engine.scheduler.timings import Timings
from engine.speculation.stats import SpeculationStats
from engine.text.tokenizer import LONG_TEXT, Tokenizer
from engine.threads.contention import ThreadGovernor, waiting_clock

_log = logging.getLogger(__name__)

_POLL_SECONDS = 2e-5
"""Time between two looks at the results of several models, for which there is no common event."""

_Command = Callable[[], None]
_Event = TypeVar("_Event", Completion | Delta, ScoreResult)


class LocalEngine:
    """``EngineClient`` over models in this process. Safe to use from several threads and event loops at once."""

    def __init__(
        self,
        models: Mapping[str, str | Path],
        options: EngineOptions | None = None,
        templates: Mapping[str, str] | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        """Load the checkpoints (name to folder). Raises ``EngineError`` with the reason if one is invalid.

        ``templates``: the chat templates that take the place of the checkpoints' own, by name. ``adapters``: the
        folders of LoRA adapters of the first model, by the names under which they are served.
        """
        if not models:
            raise EngineError("name at least one model to serve")
        self._options = options or EngineOptions()
        self._templates = dict(templates or {})
        self._adapters = dict(adapters or {})
        if both := models.keys() & self._adapters.keys():
            raise EngineError(f"{min(both)!r} names a model and an adapter: give the adapter another name")
        self._wake = threading.Condition()
        self._inbox: list[_Command] = []
        self._arriving = dict.fromkeys(models, 0)
        """Number of sequences by model in the inbox, which the cores do not count yet."""
        self._outbox = EventQueue()
        self._closed = False
        self.failure: str | None = None
        """Reason for which the engine stopped by itself."""
        loaded: Future[dict[str, EngineCore]] = Future()
        self._thread = threading.Thread(target=self._run_thread, args=(models, loaded), name="engine", daemon=True)
        self._thread.start()
        self._cores = loaded.result()
        # At exit the interpreter stops the thread anywhere, which aborts the process if a kernel is running.
        atexit.register(self._stop)

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        """Check and queue the request before returning, so that errors are raised at the call."""
        core = self._get_core(request.model)
        events: asyncio.Queue[Completion | Delta | EngineError] = asyncio.Queue()
        in_flight = self._create_request(request, events)
        in_flight.stream = stream
        if request.timeout is not None:
            in_flight.deadline = time.monotonic() + request.timeout
        core.model.add_branches(request, in_flight)
        self._submit(core, in_flight)
        return self._iterate_events(core, in_flight, events, len(request.branches))

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        core = self._get_core(request.model)
        events: asyncio.Queue[ScoreResult | EngineError] = asyncio.Queue()
        in_flight = self._create_request(request, events)
        core.model.add_items(request, in_flight)
        if not in_flight.sequences:
            return []
        self._submit(core, in_flight)
        async with aclosing(self._iterate_events(core, in_flight, events, len(request.items))) as results:
            return sorted([result async for result in results], key=lambda result: result.index)

    async def abort(self, request_id: str) -> None:
        for core in self._cores.values():
            self._post(partial(core.cancel, lambda request: request.request_id == request_id))

    async def release(self, pin_key: str, tokens: Tokens | None = None) -> None:
        if tokens is None or has_ids(tokens):  # no branch of a server that only chats is cached here
            for core in self._cores.values():
                self._post(partial(core.release, pin_key, tokens))

    async def tokenize(self, request: TokenizeRequest) -> TokenIds:
        tokenizer, text = self._get_core(request.model).model.tokenizer, request.text
        if not isinstance(text, str):
            encode_chat = partial(
                tokenizer.encode_chat,
                text,
                generation_prompt=request.generation_prompt,
                template_kwargs=request.template_kwargs,
            )
            is_long = sum(len(message.get("content") or "") for message in text) > LONG_TEXT
            return await asyncio.to_thread(encode_chat) if is_long else encode_chat()
        encode = tokenizer.encode_prompt if request.special else tokenizer.encode
        return encode(text) if len(text) <= LONG_TEXT else await asyncio.to_thread(encode, text)

    async def tokenize_prompt(self, model: str, text: str) -> TokenIds:
        """Return the token ids of a text to continue. Raises ``InvalidRequest`` if it is certainly too long."""
        served = self._get_core(model).model
        served.tokenizer.check_length(text, served.info.context, "prompt")
        return await self.tokenize(TokenizeRequest(model, text))

    def tokenizer(self, model: str) -> Tokenizer:
        """The tokenizer of a served model. Raises as ``generate``."""
        return self._get_core(model).model.tokenizer

    async def models(self) -> list[ModelInfo]:
        served = [core.model for core in self._cores.values()]
        return [info for model in served for info in (model.info, *model.adapters.values())]

    async def clear_cache(self) -> None:
        loop, cleared = asyncio.get_running_loop(), asyncio.Event()

        def clear() -> None:
            for core in self._cores.values():
                core.clear_cache()
            loop.call_soon_threadsafe(cleared.set)

        self._check_open()
        self._post(clear)
        await cleared.wait()

    async def close(self) -> None:
        """End running requests with ``EngineUnavailable``, stop the thread and free the models."""
        await asyncio.to_thread(self._stop)
        atexit.unregister(self._stop)
        self._cores.clear()

    def _stop(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """True if the thread that steps the models is running."""
        return self._thread.is_alive()

    def stats(self) -> dict[str, CoreStats]:
        """Return statistics for monitoring, by model."""
        return {name: core.stats for name, core in self._cores.items()}

    def timings(self) -> dict[str, Timings]:
        """Return timings for monitoring, by model."""
        return {name: core.timings for name, core in self._cores.items()}

    def speculation_stats(self) -> dict[str, SpeculationStats]:
        """Return the statistics of speculative decoding by model, for models with a drafter."""
        return {
            name: core.speculation_stats for name, core in self._cores.items() if core.speculation_stats is not None
        }

    async def _iterate_events(
        self, core: EngineCore, in_flight: Request, events: asyncio.Queue[_Event | EngineError], num_results: int
    ) -> AsyncGenerator[_Event, None]:
        """Yield a request's events until all its results have come. Cancel it if the iterator is closed before."""
        try:
            while num_results:
                event = await events.get()
                if isinstance(event, EngineError):
                    num_results = 0
                    raise event
                num_results -= not isinstance(event, Delta)
                yield event
        finally:
            if num_results:
                self._post(partial(core.cancel, lambda other: other is in_flight))

    def _get_core(self, model: str) -> EngineCore:
        self._check_open()
        core = self._cores.get(model)
        if core is None:
            core = next((core for core in self._cores.values() if model in core.model.adapters), None)
        if core is None:
            served = ", ".join([*self._cores, *self._adapters])
            raise InvalidRequest(f"model {model!r} is not served; served are {served}", "model")
        return core

    def _check_open(self) -> None:
        if self.failure is not None:
            raise EngineUnavailable(f"the engine has stopped: {self.failure}")
        if self._closed:
            raise EngineUnavailable("the engine is closed")

    def _create_request(self, request: GenerateRequest | ScoreRequest, events: asyncio.Queue[Any]) -> Request:
        return Request(
            request.request_id,
            self._outbox.create_callback(events),
            priority=request.priority,
            namespace=request.cache_salt,
            pin_key=request.pin_key,
            allow_draft=isinstance(request, GenerateRequest) and request.draft,
        )

    def _submit(self, core: EngineCore, in_flight: Request) -> None:
        name, new = core.model.info.id, len(in_flight.sequences)
        with self._wake:
            waiting = self._arriving[name] + core.num_waiting
            if waiting + new > (limit := self._options.max_waiting):
                raise EngineBusy(f"{waiting} sequences wait and {new} more would pass {limit}; try later")
            self._check_open()
            self._arriving[name] += new
            self._inbox.append(partial(self._start, core, in_flight, new))
            self._wake.notify()

    def _start(self, core: EngineCore, in_flight: Request, sequences: int) -> None:
        try:
            core.submit(in_flight)
        except Exception as error:
            in_flight.on_event(EngineError(f"the engine could not take this request: {error!r}"))
            raise
        finally:
            with self._wake:
                self._arriving[core.model.info.id] -= sequences

    def _post(self, command: _Command) -> None:
        with self._wake:
            if self._thread.is_alive():
                self._inbox.append(command)
                self._wake.notify()

    def _run_thread(self, models: Mapping[str, str | Path], loaded: Future[dict[str, EngineCore]]) -> None:
        # All computation, loading included, is on this one thread: OpenMP keeps a thread pool for each calling thread,
        # and once the pools have more threads than there are processors, their threads sleep between two operators,
        # which halves the speed.
        served: dict[str, EngineCore] = {}
        try:
            memory = GpuMemory(self._options.gpu_memory_utilization)
            weights: list[ModelWeights] = []
            for name, folder in models.items():
                with name_checkpoint(Path(folder)):
                    checkpoint, template = open_checkpoint(Path(folder)), self._templates.get(name)
                    weights.append(
                        ModelWeights(
                            name,
                            checkpoint,
                            options=self._options,
                            memory=memory,
                            template=template,
                            adapters=None if weights else self._adapters,
                        )
                    )
            for one in weights:
                with name_checkpoint(Path(models[one.name])):
                    served[one.name] = EngineCore(one.name, one.folder, self._options, one)
            loaded.set_result(served)
        except Exception as error:
            for core in served.values():
                core.close()
            loaded.set_exception(error)
            return
        cores = list(loaded.result().values())
        try:
            self._serve(cores)
        except Exception as error:
            _log.critical("the engine stops", exc_info=True)
            with self._wake:
                self.failure = repr(error)
                commands, self._inbox = self._inbox, []
            _carry_out(commands)
            for core in cores:
                core.fail(EngineUnavailable(f"the engine has stopped: {self.failure}"))
                core.close()
            self._outbox.send()

    def _serve(self, cores: list[EngineCore]) -> None:
        """Execute commands and step the models until the engine is closed. Raises only for fatal errors."""
        governor = _create_governor(cores)
        for core in cores:
            core.on_load(self._notify)
        while True:
            with self._wake:
                rested = not any(core.has_work for core in cores)
                while not (self._inbox or self._closed or any(_can_step(core) for core in cores)):
                    self._wake.wait(_find_wake_seconds(cores))
                commands, self._inbox = self._inbox, []
                closed = self._closed
            if rested and governor is not None:
                governor.begin()
            _carry_out(commands)
            self._outbox.send()
            if closed:
                break
            for core in cores:
                if core.has_work:
                    core.launch()
                    self._outbox.send()
                    if governor is not None:
                        governor.step()
                self._check_invariants(core)
            for core in _wait_for_any([core for core in cores if _can_step(core)]):
                core.finish()
                self._outbox.send()
                self._check_invariants(core)
        for core in cores:
            core.fail(EngineUnavailable("the engine was closed"))
            core.close()
        self._outbox.send()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _check_invariants(self, core: EngineCore) -> None:
        if self._options.debug and not core.has_work:
            core.check_invariants()


def _can_step(core: EngineCore) -> bool:
    return core.has_work and not core.waits_for_loads


def _find_wake_seconds(cores: Sequence[EngineCore]) -> float | None:
    """Return the time until a core that waits for loads has to go on; ``None`` without such a time."""
    wake = min((core.wake_time for core in cores if core.has_work), default=math.inf)
    return None if wake == math.inf else max(0.0, wake - time.monotonic())


def _wait_for_any(cores: Sequence[EngineCore]) -> Sequence[EngineCore]:
    """Wait until the device has results of one of the models or can be given more work; return these models.

    Several models compute beside each other on a GPU, and none waits for the results of another.
    """
    ready = [core for core in cores if core.has_results]
    while len(cores) > 1 and not ready:
        time.sleep(_POLL_SECONDS)
        ready = [core for core in cores if core.has_results]
    return ready or cores


def _create_governor(cores: Sequence[EngineCore]) -> ThreadGovernor | None:
    """Return the governor of the calling thread's number of threads; ``None`` if the number is fixed.

    It is fixed if there is one thread, results must be reproducible to the bit, a GPU computes, or the system has no
    clock of waiting threads.
    """
    full = torch.get_num_threads()
    if full == 1 or any(not core.can_change_threads for core in cores):
        return None
    from kernels.cpu.runtime.kernel import thread_ids

    waited = waiting_clock(thread_ids())
    return None if waited is None else ThreadGovernor(full, torch.set_num_threads, waited)


def _carry_out(commands: Sequence[_Command]) -> None:
    for command in commands:
        try:
            command()
        except Exception:
            # A failing command must not end the thread.
            _log.exception("a command to the engine failed")
