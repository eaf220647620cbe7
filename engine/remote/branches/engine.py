"""The common base of clients of OpenAI-compatible servers, whether these complete texts or chat."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from contextlib import aclosing

from engine.protocol.request_checks import check_branches, find_setting_outside
from engine.protocol.types import EngineClient, Events, GenerateRequest, NotSupported, ScoreRequest, Tokens
from engine.remote.branches.running import RunningRequest, RunningRequests
from engine.remote.connection import Connection


class OpenAICompatibleEngine(EngineClient):
    """Client of a server of OpenAI's API, which cannot pin."""

    def __init__(self, connection: Connection, kind: str, settings: Collection[str]) -> None:
        """``kind``: names the server in messages. ``settings``: the fields of ``SamplingParams`` that it takes."""
        self._connection = connection
        self._kind = kind
        self._settings = settings
        self._running = RunningRequests()

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        self._check_request(request)

        def start(running: RunningRequest) -> Sequence[Events]:
            return self._start_streams(running, is_watched=stream)

        async with aclosing(self._running.generate(request, start, stream=stream)) as events:
            async for event in events:
                yield event

    async def abort(self, request_id: str) -> None:
        """Cancel the branches that this client has in flight; they end with what has been received so far."""
        self._running.abort(request_id)

    async def release(self, pin_key: str, tokens: Tokens | None = None) -> None:  # noqa: ARG002
        return None  # these servers cannot pin

    async def close(self) -> None:
        await self._connection.close()

    @abstractmethod
    def _start_streams(self, running: RunningRequest, *, is_watched: bool) -> Sequence[Events]:
        """Return the events of a request's branches. ``is_watched``: the text is shown as it comes."""

    def _check_request(self, request: GenerateRequest) -> None:
        """Raise ``EngineError``, naming the setting, if the server would ignore or refuse one."""
        if (name := find_setting_outside(request.sampling, self._settings)) is not None:
            raise self._build_refusal(f"honour {name}")
        self._check_probe(request)
        check_branches(request)
        if request.sampling.counts_tokens and any(branch.generated for branch in request.branches):
            raise self._build_refusal("count tokens of an earlier request for frequency_penalty and presence_penalty")

    def _check_probe(self, request: GenerateRequest | ScoreRequest) -> None:
        if request.probe:
            raise self._build_refusal(
                "read a probe, which needs the model's hidden states: serve the model on our engine"
            )

    def _check_items(self, request: ScoreRequest) -> None:
        if any(item.key_bound is not None for item in request.items):
            raise self._build_refusal("bound the keys of a thought: leave key_bound out")

    def _build_refusal(self, what: str) -> NotSupported:
        return unsupported(self._connection.url, self._kind, what)


def unsupported(url: str, kind: str, what: str) -> NotSupported:
    """Return the error of a server that cannot do ``what``."""
    return NotSupported(f"the server at {url} ({kind}) cannot {what}")
