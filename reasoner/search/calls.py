"""Run the calls of branches, and fit their output into the tokens that the branches have left."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from engine.protocol.types import EngineClient, Tokens
from reasoner.search.branch import InFlightBranch
from reasoner.search.policies.policy import Policy
from reasoner.tools.python import CallResult, PythonRunner

MAX_REQUESTS = 8
"""Number of requests to the tokenizer at the same time."""
_DELIMITER = re.compile(r"(?<=[<\[◁])(?=[^\W\d]|[|\uff5c/])")
"""Places after the first character of the delimiters of chat templates, such as ``<|im_end|>`` or ``[/INST]``."""


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a call, as the branch's next text."""

    text: str
    token_ids: Tokens
    result: CallResult


class CallRunner:
    """Runs the calls of a search's branches."""

    def __init__(
        self, python: PythonRunner, engine: EngineClient, policies: tuple[Policy, ...], max_calls: int
    ) -> None:
        """``max_calls``: number of calls of one solution."""
        self.max_calls = max_calls
        self._python = python
        self._engine = engine
        self._policies = policies
        self._requests = asyncio.Semaphore(MAX_REQUESTS)

    async def run(self, branch: InFlightBranch) -> Output | None:
        """Run the call with which a branch ends; ``None`` if the job's time ends first.

        The output takes at most half of the tokens that the branch has left; it is shortened in its middle for that.
        """
        before = branch.parent.solution + branch.text
        result = await self._python.run(before)
        if result is None:
            return None
        model, room = self._policies[branch.parent.policy].model.id, branch.tokens_left // 2
        text = result.format(before)
        tokens = await self._tokenize(model, text)
        if len(tokens) > room:
            text = result.format(before, len(result.output) * room // (2 * len(tokens)))
            tokens = await self._tokenize(model, text)
        return Output(text, tokens, result)

    async def _tokenize(self, model: str, text: str) -> Tokens:
        """Return the tokens of a text, in which delimiters of the chat template are spelled and thus have no effect."""

        async def tokenize(piece: str) -> Tokens:
            async with self._requests:
                return await self._engine.tokenize(model, piece, special=False)

        parts = await asyncio.gather(*(tokenize(piece) for piece in _DELIMITER.split(text)))
        return tuple(token for part in parts for token in part)
