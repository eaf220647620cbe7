"""Finds the delimiters of a policy's thoughts with its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

from engine.protocol.thoughts import DELIMITERS
from engine.protocol.types import (
    Capability,
    EngineClient,
    InvalidRequest,
    ModelInfo,
    NotSupported,
    TokenizeRequest,
    Tokens,
)
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.thought_spec import ThoughtSpec
from reasoner.search.policies.call_format import find_model_format, find_python_format
from reasoner.thoughts import ThoughtFormat

_PIECE = re.compile(r"<[^>]*>|\[[^\]]*\]|[^<\[]+")
_UNUSED = "\U0010fffd"
"""A character of no language: a tokenizer that has a token for unknown text uses it here."""
_MAX_FORMATS = 256
_FORMATS: dict[tuple[str, str, str | None], ThoughtFormat | None] = {}
"""Formats by model, fingerprint and the job's own delimiters: they are found once a process."""


async def find_own_thoughts(spec: JobSpec, engine: EngineClient, policy: ModelInfo) -> ThoughtFormat | None:
    """Return the delimiters of the thoughts that the policy writes in a job; ``None`` if it has none.

    A thought in channels ends with the message to the user or with a call, of which no end can be injected. Raises as
    ``find_thought_format``.
    """
    own = find_model_format(spec, policy) if spec.functions else find_python_format(spec)
    return None if own is not None and own.has_channels else await find_thought_format(engine, policy, spec.thoughts)


async def find_thought_format(
    engine: EngineClient, policy: ModelInfo, thoughts: ThoughtSpec | None
) -> ThoughtFormat | None:
    """Return the delimiters of the policy's thoughts: those given, or the first public ones that are tokens of its own.

    ``None`` if it has none. Raises ``InvalidRequest`` for given delimiters that the tokenizer cannot spell.
    """
    if policy.tells_thoughts or Capability.CONTINUATION not in policy.capabilities:
        if thoughts is not None:
            raise InvalidRequest(
                f"thoughts: the server of model {policy.id!r} only chats or cannot continue a solution: leave them out",
                "thoughts",
            )
        if not policy.tells_thoughts:  # no thought can be closed from outside
            return None
    key = (policy.id, policy.fingerprint, None if thoughts is None else thoughts.model_dump_json())
    if key not in _FORMATS or not policy.fingerprint:
        if len(_FORMATS) >= _MAX_FORMATS:
            _FORMATS.clear()
        _FORMATS[key] = await _find(engine, policy, thoughts)
    return _FORMATS[key]


Encode = Callable[[str], Awaitable[Tokens]]


async def _find(engine: EngineClient, policy: ModelInfo, thoughts: ThoughtSpec | None) -> ThoughtFormat | None:
    async def encode(text: str) -> Tokens:
        return await engine.tokenize(TokenizeRequest(policy.id, text, special=False))

    if thoughts is not None:
        await _check_spelling(encode, policy, thoughts)
        return await _make_format(encode, thoughts.open, thoughts.close, thoughts.forced)
    if policy.tells_thoughts:
        return replace(await _make_format(encode, *DELIMITERS[0], None), is_told=True)
    try:
        for opening, closing in DELIMITERS:
            if await _has_own_tokens(encode, opening) and await _has_own_tokens(encode, closing):
                return await _make_format(encode, opening, closing, None)
    except NotSupported:
        return None
    return None


async def _has_own_tokens(encode: Encode, delimiter: str) -> bool:
    """Return True if each tag of a delimiter, and each word between tags, is one token."""
    return len(await encode(delimiter)) == len(_PIECE.findall(delimiter))


async def _make_format(encode: Encode, opening: str, closing: str, forced: str | None) -> ThoughtFormat:
    if forced is None:
        forced = closing if closing.startswith("<|") else f"\n{closing}\n\n"
    end = _PIECE.findall(closing)[0]
    return ThoughtFormat(
        opening,
        closing,
        opening_ids=await encode(opening),
        closing_ids=await encode(closing),
        forced=forced,
        forced_ids=await encode(forced),
        blank_ids=frozenset([*await encode("\n"), *await encode("\n\n")]),
        has_end_token=not end.isalnum() and len(await encode(end)) == 1,
    )


async def _check_spelling(encode: Encode, policy: ModelInfo, thoughts: ThoughtSpec) -> None:
    unknown = await encode(_UNUSED)
    for field, text in (("open", thoughts.open), ("close", thoughts.close), ("forced", thoughts.forced or "")):
        tokens = await encode(text)
        if text and (not tokens or (len(unknown) == 1 and unknown[0] in tokens)):
            raise InvalidRequest(
                f"thoughts.{field}: the tokenizer of model {policy.id!r} cannot spell {text!r}: give the delimiters "
                "that its chat template uses, or leave 'thoughts' out",
                f"thoughts.{field}",
            )
