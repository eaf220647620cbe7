"""Bodies of completion requests to OpenAI-compatible servers, and the seeds of their samples."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict

from engine.protocol.constraint import Constraint
from engine.protocol.types import Branch, GenerateRequest, SamplingParams
from engine.protocol.wire import Json
from engine.remote.openai.dialects import Dialect

TOKENS_PER_EVENT = 8
"""Tokens that a server puts into one event of a stream that nobody watches. Reading an event costs more than computing
a token of a small model does, and tokens that wait on the server are not received if the request is aborted."""
_SEED_BITS = 31
"""Seeds that every server accepts."""
_OPTIONAL = frozenset({"stop", "stop_token_ids", "logit_bias"})
"""Settings for which no server has a default of its own."""


def group_siblings(branches: Sequence[Branch], dialect: Dialect) -> list[list[int]]:
    """Return the indices of branches by request: those that differ only in consecutive seeds share one.

    A server computes the prompt of one request once and sends one stream for all of its samples.
    """
    groups: list[list[int]] = []
    for index, branch in enumerate(branches):
        last = branches[groups[-1][-1]] if groups else None
        if dialect.numbers_seeds and last is not None and _follows(branch, last):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _follows(branch: Branch, last: Branch) -> bool:
    same = (branch.generated, branch.max_tokens) == (last.generated, last.max_tokens)
    return same and branch_seed(branch) == branch_seed(last) + 1


def branch_seed(branch: Branch) -> int:
    """Return a seed of 31 bits, from a branch's seed, key and number of generated tokens.

    The number is included because servers count noise from the start of a request: a continuation must not repeat the
    noise of its beginning. The seeds of siblings, which have ``Branch.sibling``, are consecutive.
    """
    key, index = (branch.key, 0) if branch.sibling is None else branch.sibling
    words = f"{branch.seed}/{key}/{len(branch.generated)}"
    first = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest(), "little") >> 1
    return (first + index) % (1 << _SEED_BITS)


def sampling_fields(sampling: SamplingParams, dialect: Dialect) -> Json:
    """Return every setting that the server knows, since it may have defaults of its own.

    vLLM and SGLang take those that a request leaves out from the checkpoint's generation_config.json.
    """
    values = asdict(sampling)
    fields = {name: values[name] for name in dialect.settings if name not in _OPTIONAL or values[name]}
    fields.pop("logprobs", None)
    if fields.get("top_k") == 0:
        fields["top_k"] = -1  # off: 0 is refused by SGLang and older versions of vLLM
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return fields


def completion_body(
    request: GenerateRequest, branches: Sequence[Branch], prompt: str | list[int], dialect: Dialect, *, stream: bool
) -> Json:
    """Return the body of the request for branches of one group (``group_siblings``).

    ``stream``: text is watched as it comes, so that each token is an event of its own.
    """
    first = branches[0]
    body: Json = {
        "model": request.model,
        "prompt": prompt,
        "max_tokens": first.max_tokens,
        "seed": branch_seed(first),
        "stream": True,
        "stream_options": {"include_usage": True},
        **dialect.extensions,
        **sampling_fields(request.sampling, dialect),
    }
    if request.sampling.logprobs is not None:
        body |= {"return_tokens_as_token_ids": True, "logprobs": request.sampling.logprobs}
    if request.shows_special:
        body["skip_special_tokens"] = False
    if request.constraint is not None:
        body |= constraint_fields(request.constraint, dialect)
    if len(branches) > 1:
        body["n"] = len(branches)
    if dialect.bundles_tokens and not stream:
        body["stream_interval"] = TOKENS_PER_EVENT
    return body


def constraint_fields(constraint: Constraint, dialect: Dialect) -> Json:
    """Return a constraint in the server's form. vLLM and SGLang read a grammar as EBNF unless they use llguidance."""
    if dialect.constrains == "structured_outputs":
        return {"structured_outputs": constraint.to_json()}
    match constraint.kind:
        case "json":
            return {"json_schema": constraint.value}
        case "regex":
            return {"regex": constraint.value}
        case "choice":
            return {"regex": "|".join(map(re.escape, json.loads(constraint.value)))}
        case "grammar":
            return {"ebnf": constraint.value}


def routing_headers(request_id: str, lease: str | None) -> dict[str, str]:
    """Return headers for the server's log, and for routers that send a session's requests to one replica.

    vLLM's routers read ``X-Session-ID``, SGLang's ``X-SMG-Routing-Key``.
    """
    session = {} if lease is None else {"X-Session-ID": lease, "X-SMG-Routing-Key": lease}
    return {"X-Request-Id": request_id} | session
