"""The models of a chat server, which is asked for them every few minutes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.protocol.types import EngineError, EngineUnavailable, ModelInfo, NotSupported
from engine.protocol.wire import Json
from engine.remote.chat.options import ChatOptions
from engine.remote.connection import Connection

_LIST_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class _List:
    """The models that a server has listed, by id."""

    entries: dict[str, Json]
    read_at: float = field(default_factory=time.monotonic)


_LISTS: dict[tuple[str, str | None], _List] = {}
"""By the server's address and key, for all clients of a process. Dropped when the server fails."""


class ModelList:
    """The models of one server. Hosted ones count each question against a rate limit."""

    def __init__(self, connection: Connection, options: ChatOptions) -> None:
        self._connection = connection
        self._options = options
        self._place = connection.url, connection.api_key

    async def read(self) -> list[ModelInfo]:
        """Return the configured models, or all that the server lists."""
        listed = _LISTS.get(self._place)
        if listed is None or time.monotonic() > listed.read_at + _LIST_SECONDS:
            try:
                answer = await self._connection.call("GET", "/v1/models", None, should_wait=False)
            except NotSupported:
                if not self._options.models:
                    raise
                answer = {"data": [{"id": name} for name in self._options.models]}
            listed = _LISTS[self._place] = _List(_read_list(answer, self._connection.source))
        known = listed.entries
        names = self._options.models or tuple(known)
        missing = [name for name in names if name not in known]
        if missing:
            raise EngineError(
                f"the server at {self._connection.url} does not list the model {missing[0]!r}; it lists "
                f"{', '.join(sorted(known)[:20]) or 'none'}"
            )
        return [self._describe(known[name]) for name in names]

    def forget(self) -> None:
        """Ask again at the next call, since the server has failed."""
        _LISTS.pop(self._place, None)

    def _describe(self, entry: Json) -> ModelInfo:
        reported = entry.get("max_model_len") or entry.get("context_length") or (entry.get("meta") or {}).get("n_ctx")
        context = reported or self._options.context
        return ModelInfo(
            entry["id"],
            "generate",
            int(context),
            vocab_size=0,
            parameters=0,
            extra={"server": "chat"},
            counts_exactly=False,
            isolates=False,
            capabilities=self._options.capabilities,
            tells_thoughts=True,
            limits_thoughts=self._options.thinking_limit != "none",
            tells_calls=not self._options.is_literal,
        )


def _read_list(answer: Json, source: str) -> dict[str, Json]:
    """Return the models that a server lists, by id. Raises ``EngineUnavailable`` for an answer of another form."""
    try:
        return {str(entry["id"]): entry for entry in answer["data"]}
    except (KeyError, TypeError) as error:
        raise EngineUnavailable(f"{source} did not answer /v1/models with a list of models: {error!r}") from error
