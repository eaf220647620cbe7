"""Bodies of completion requests to OpenAI-compatible servers, and the seeds of their samples."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import asdict

from engine.protocol.constraint import Constraint
from engine.protocol.request_checks import require_ids
from engine.protocol.types import (
    Branch,
    GenerateRequest,
    NotSupported,
    SamplingParams,
    ScoreRequest,
    TokenIds,
    TokenizeRequest,
)
from engine.protocol.wire import Json
from engine.remote.branches.engine import unsupported
from engine.remote.branches.stream import branch_seed
from engine.remote.connection import Connection
from engine.remote.local_tokenizer import LocalTokenizer
from engine.remote.openai.answer import TextAnswer
from engine.remote.openai.dialects import Dialect

TOKENS_PER_EVENT = 8
"""Tokens that a server puts into one event of a stream that nobody watches. Reading an event costs more than computing
a token of a small model does, and tokens that wait on the server are not received if the request is aborted."""
_OPTIONAL = frozenset({"stop", "stop_token_ids", "logit_bias"})
"""Settings for which no server has a default of its own."""


class CompletionRequests:
    """The form of the requests to one server."""

    def __init__(
        self,
        connection: Connection,
        dialect: Dialect,
        tokenizer: LocalTokenizer | None,
        *,
        obeys_priorities: bool = False,
    ) -> None:
        """``tokenizer``: that of its model; a server of the plain dialect is then sent prompts as text."""
        self.connection = connection
        self._priority_sign = (dialect.priority_sign or 0) if obeys_priorities else 0
        self.dialect = dialect
        self.tokenizer = tokenizer
        self._speaks_text = tokenizer is not None and dialect.name == "openai"
        self._epoch = ""
        """Added to the salt of requests after ``forget_cache``."""

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary; 0 if it is not known."""
        return 0 if self.tokenizer is None else self.tokenizer.vocab_size

    def begin_answer(self, request: GenerateRequest, index: int) -> TextAnswer:
        """Return the answer of a branch of which nothing has arrived."""
        return TextAnswer(index, request.branches[index], stops=request.sampling.stop)

    def make_body(self, request: GenerateRequest, branches: Sequence[Branch], *, is_watched: bool) -> Json:
        """Return the body of a request for siblings, which have the same tokens so far."""
        prompt = self.make_prompt([*require_ids((*request.prompt, *branches[0].generated), "prompt")])
        body = completion_body(request, branches, prompt, self.dialect, is_watched=is_watched)
        return body | self.make_shared_fields(request)

    def make_prompt(self, tokens: list[int]) -> str | list[int]:
        """Return a prompt as the server takes it. Raises ``InvalidRequest`` for tokens that are no text."""
        return self.tokenizer.decode(tokens) if self._speaks_text and self.tokenizer is not None else tokens

    def make_shared_fields(self, request: GenerateRequest | ScoreRequest) -> Json:
        """Return the fields that isolate cached prefixes and order requests.

        Raises ``EngineError`` if the server cannot isolate.
        """
        priority = request.priority * self._priority_sign
        fields: Json = {"priority": priority} if priority else {}
        if request.cache_salt is None and not self._epoch:
            return fields
        if not self.dialect.salts:
            raise self.cannot("keep caches apart by cache_salt")
        return fields | {"cache_salt": f"{request.cache_salt or ''}{self._epoch}"}

    def forget_cache(self) -> None:
        """Use no prefix any more that is cached by now: from here on, the salt of all requests is another one."""
        self._epoch = uuid.uuid4().hex

    async def tokenize(self, request: TokenizeRequest) -> TokenIds:
        """Tokenize with the local tokenizer if there is one, otherwise on the server."""
        if self.tokenizer is not None:
            return self.tokenizer.tokenize(request)
        if not self.dialect.tokenizes:
            raise self.cannot("tokenise; name the folder of its model's tokenizer")
        if not isinstance(request.text, str) and not self.dialect.chats:
            raise self.cannot("tokenise chat messages; name the folder of its model's tokenizer")
        return await self.connection.tokenize(request, functions_apart=True)

    def name_token(self, token: int) -> str:
        """Return the server's name for a token in lists of log-probabilities."""
        if self.dialect.name == "vllm":
            return f"token_id:{token}"
        if self.tokenizer is None:
            raise self.cannot("tell tokens apart; name the folder of its model's tokenizer")
        return self.tokenizer.piece(token)

    def cannot(self, what: str) -> NotSupported:
        return unsupported(self.connection.url, self.dialect.name, what)


def group_siblings(branches: Sequence[Branch], dialect: Dialect) -> list[list[int]]:
    """Return the indices of branches by request: those that differ only in consecutive seeds share one.

    A server computes the prompt of one request once and sends one stream for all of its samples.
    """
    groups: list[list[int]] = []
    for index, branch in enumerate(branches):
        last = branches[groups[-1][-1]] if groups else None
        if dialect.numbers_seeds and last is not None and _is_next_branch(branch, last):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _is_next_branch(branch: Branch, last: Branch) -> bool:
    same = (branch.generated, branch.max_tokens) == (last.generated, last.max_tokens)
    return same and branch_seed(branch) == branch_seed(last) + 1


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
    request: GenerateRequest, branches: Sequence[Branch], prompt: str | list[int], dialect: Dialect, *, is_watched: bool
) -> Json:
    """Return the body of the request for branches of one group (``group_siblings``).

    ``is_watched``: text is shown as it comes, so that each token is an event of its own.
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
    if not request.skip_special_tokens:
        body["skip_special_tokens"] = False
    if request.constraint is not None:
        body |= constraint_fields(request.constraint, dialect)
    if len(branches) > 1:
        body["n"] = len(branches)
    if dialect.bundles_tokens and not is_watched:
        body["stream_interval"] = TOKENS_PER_EVENT
    return body


def constraint_fields(constraint: Constraint, dialect: Dialect) -> Json:
    """Return a constraint in the server's form. vLLM and SGLang read a grammar as EBNF unless they use llguidance."""
    if dialect.constraint_form == "structured_outputs":
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
