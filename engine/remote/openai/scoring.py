"""Scoring with models on OpenAI-compatible servers, at chosen positions.

A reward model is scored through vLLM's ``/pooling`` with token ids: the server returns a row for every token, for its
own step tag (pooling type ``STEP``) or for the last token (``LAST``), as logits or as probabilities. Only the last of
these reads cached prefixes. A causal model samples one token after each position. vLLM reports the log-probabilities of
the tokens asked for (``logprob_token_ids``); others list the likeliest tokens, and one that is not listed gets the
lowest listed value, an upper bound. Where log-probabilities among all tokens are asked for, as those of many grades, it
counts as impossible instead: many upper bounds together would be more than the probability that is left.

Source: https://docs.vllm.ai/en/latest/models/pooling_models/ and vLLM's ``PoolingParams``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from engine.protocol.types import Completion, EngineError, ScoreResult, TokenLogprob
from engine.protocol.wire import Json
from engine.remote.connection import Connection
from engine.remote.openai.dialects import Dialect

_AT_ONCE = 16
"""The number of concurrent requests."""
_UNLIKELY = -30.0
"""Log-probability of a token that counts as impossible."""
Row = tuple[float, ...]


class OpenAIScorer:
    """Scorer on one server."""

    def __init__(self, connection: Connection, dialect: Dialect) -> None:
        self._connection = connection
        self._dialect = dialect
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self.pooling: Literal["unknown", "last", "rows"] = "unknown"
        """``last``: a row for the last token. ``rows``: one for each token, or for each step tag."""

    async def rows(
        self, index: int, model: str, tokens: Sequence[int], reads: Sequence[int], salt: Json
    ) -> ScoreResult:
        """Return a reward model's label logits at the positions ``reads`` of one sequence, which ends with the last.

        A server that pools the last token is asked once for each position. It computes what its prefix cache does not
        hold, and reports all as computed. ``salt``: fields that isolate the cached prefixes of the request.
        """
        answers: dict[int, Json] = {}
        async with self._slots:
            if len(reads) > 1 and self.pooling == "unknown":  # two positions have two rows unless only the last has one
                answers[reads[1]] = await self._pool(model, tokens[: reads[1] + 1], salt)
                self.pooling = "last" if len(_read_rows(answers[reads[1]])) == 1 else "rows"
            for position in reads if self.pooling == "last" else reads[-1:]:
                if position not in answers:
                    answers[position] = await self._pool(model, tokens[: position + 1], salt)
        if self.pooling == "last":
            rows = [_read_rows(answers[position])[0] for position in reads]
        else:
            rows = _select_rows(_read_rows(answers[reads[-1]]), tokens, reads)
        bills = [_read_usage(answer) for answer in answers.values()]
        computed, cached = (sum(counts) for counts in zip(*bills, strict=True))
        return ScoreResult(index, tuple(_to_logits(row) for row in rows), computed, cached)

    async def _pool(self, model: str, tokens: Sequence[int], salt: Json) -> Json:
        body = {"model": model, "input": list(tokens), "encoding_format": "float"}
        # The present and the former name of vLLM's option for raw logits.
        raw = {"use_activation": False, "activation": False}
        answer: Json = await self._connection.call("POST", "/pooling", body | raw | salt)
        return answer

    async def logits(
        self,
        index: int,
        model: str,
        prompts: Sequence[str | Sequence[int]],
        wanted: Mapping[int, str],
        salt: Json,
        *,
        is_normalized: bool = False,
    ) -> ScoreResult:
        """Return the log-probabilities of tokens after each of the prompts.

        ``wanted``: the token ids, each with the server's name for it in lists of log-probabilities. ``is_normalized``:
        they must not be upper bounds.
        """
        values, computed, cached = [], 0, 0
        for prompt in prompts:
            body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
            body["logprobs"] = self._dialect.likeliest  # for versions that ignore the next line
            if self._dialect.reads_tokens:
                body |= {"logprob_token_ids": [*wanted], "return_tokens_as_token_ids": True}
            async with self._slots:
                answer = await self._connection.call("POST", "/v1/completions", body | salt)
            num_computed, num_cached = _read_usage(answer)
            computed, cached = computed + num_computed, cached + num_cached
            row = _read_logprobs(answer, list(wanted.values()), is_normalized=is_normalized)
            if row is None:
                names = ", ".join(map(repr, wanted.values()))
                unread = f"none of {names} is among the likeliest tokens where one is due"
                return ScoreResult(index, (), computed, cached_tokens=cached, unread=unread)
            values.append(row)
        return ScoreResult(index, tuple(values), computed, cached)

    async def score_prompt(self, model: str, prompt: Sequence[int], count: int, salt: Json) -> Completion:
        """Return the log-probabilities of a prompt's tokens, and of the ``count`` likeliest at each position.

        The server samples a token after them, too, which is on the bill of a completion without tokens.
        """
        body = {"model": model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": count}
        async with self._slots:
            answer = await self._connection.call("POST", "/v1/completions", body | salt)
        try:
            rows: list[Json | None] = answer["choices"][0]["prompt_logprobs"]
            scored = [_read_position(row, token, count) for row, token in zip(rows, prompt, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"the answer with prompt_logprobs is not understood: {error!r}") from error
        texts = {int(id): _text_of(id, entry) for row in rows if row for id, entry in row.items()}
        computed, cached = _read_usage(answer)
        return Completion(
            index=0,
            token_ids=(),
            text="",
            finish_reason="length",
            stop=None,
            logprob=0.0,
            prompt_tokens=computed + cached,
            cached_tokens=cached,
            prompt_logprobs=tuple(scored),
            token_texts=texts,
        )


def _read_position(row: Json | None, token: int, count: int) -> TokenLogprob | None:
    if row is None:  # the first one
        return None
    likeliest = sorted(row.items(), key=lambda pair: pair[1]["rank"])[:count]
    return TokenLogprob(
        token, row[str(token)]["logprob"], tuple((int(id), entry["logprob"]) for id, entry in likeliest)
    )


def _text_of(token: str, entry: Json) -> str:
    text: str = entry.get("decoded_token") or ""
    return text if text and "\ufffd" not in text else f"token_id:{token}"


def _read_rows(answer: Json) -> list[Row]:
    """Return the rows of the response: one of a server that pools the last token."""
    try:
        data = answer["data"][0]["data"]
        return [tuple(map(float, row)) for row in (data if isinstance(data[0], list) else [data])]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"the answer of /pooling is not understood: {error!r}") from error


def _select_rows(rows: Sequence[Row], tokens: Sequence[int], reads: Sequence[int]) -> list[Row]:
    """Select the rows at ``reads`` from those of all tokens, or of all step tags."""
    if len(rows) == len(tokens):
        return [rows[position] for position in reads]
    tags = {tokens[position] for position in reads}
    marked = [position for position, token in enumerate(tokens) if token in tags]
    if len(tags) == 1 and len(rows) == len(marked):
        return [rows[marked.index(position)] for position in reads]
    if len(rows) == 1 and list(reads) == [len(tokens) - 1]:
        return list(rows)
    raise EngineError(
        f"/pooling answered {len(rows)} rows for {len(tokens)} tokens, {len(marked)} of them like those to be read: "
        "serve the model with pooling type LAST, ALL, or STEP with its own step tag"
    )


def _to_logits(row: Row) -> Row:
    """Return logits whose softmax is the row if it holds probabilities; otherwise return the row itself."""
    if len(row) > 1 and min(row) >= 0 and abs(math.fsum(row) - 1) < 1e-3:
        return tuple(math.log(max(value, 1e-30)) for value in row)
    return row


def _read_logprobs(answer: Json, wanted: Sequence[str], *, is_normalized: bool) -> Row | None:
    """Return the log-probabilities of tokens, or upper bounds of them; ``None`` if none of them is listed."""
    try:
        likeliest: dict[str, float] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    except (KeyError, IndexError, TypeError) as error:
        raise EngineError("the server reports no log-probabilities, and so it cannot score") from error
    if not likeliest:
        raise EngineError("the server reports no log-probabilities, and so it cannot score")
    if not likeliest.keys() & set(wanted):
        return None
    unlisted = _UNLIKELY if is_normalized else min(likeliest.values())
    return tuple(likeliest.get(token, unlisted) for token in wanted)


def _read_usage(answer: Json) -> tuple[int, int]:
    """Return the reported numbers of computed and cached tokens."""
    usage = answer.get("usage") or {}
    read = usage.get("prompt_tokens")
    if not isinstance(read, int):
        raise EngineError("the server does not report prompt_tokens, which a budget is held against")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return read - cached + (usage.get("completion_tokens") or 0), cached
