"""Run the calls of tools, and fit their output into the tokens that the branches have left."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol.types import EngineClient, TokenizeRequest, Tokens
from reasoner.search.branch_text import BranchText
from reasoner.search.policies.policy import Policy
from reasoner.search.policies.tool_messages import ToolMessages
from reasoner.tools.calls import CallReader, PythonCall
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
    next_turn: Tokens = ()
    """The last of the tokens, which begin the model's next turn, if the call has ended one."""


class CallRunner:
    """Runs the calls of a search's branches."""

    def __init__(
        self,
        python: PythonRunner,
        engine: EngineClient,
        policies: tuple[Policy, ...],
        max_calls: int,
        reader: CallReader | None = None,
        messages: Sequence[ToolMessages] = (),
    ) -> None:
        """``max_calls``: number of calls of one solution. ``messages``: those of each policy, for calls in their own
        format."""
        self.max_calls = max_calls
        self.reader = reader or CallReader()
        self._messages = messages
        self._python = python
        self._engine = engine
        self._policies = policies
        self._requests = asyncio.Semaphore(MAX_REQUESTS)

    async def run(self, branch: BranchText) -> Output | None:
        """Run the call with which a branch ends; ``None`` if the job's time ends first.

        The output takes at most half of the tokens that the branch has left; it is shortened in its middle for that.
        """
        texts = branch.texts_between_outputs
        calls = [self.reader.find(text, ends_turn=True) for text in texts]
        call = calls[-1]
        assert call is not None  # with which the branch ends
        if call.code is None:
            return await self._fit(branch, call, CallResult(f"error: {call.fault}", "error", 0.0))
        cells = [each.code for each in calls if each is not None and each.code is not None]
        result = await self._python.run(cells)
        return None if result is None else await self._fit(branch, call, result)

    async def _fit(self, branch: BranchText, call: PythonCall, result: CallResult) -> Output:
        """Return the output of a call, in the form in which the model's calls have it."""
        write = self._write_turn if call.is_own else self._write_block
        room, output = branch.tokens_left // 2, await write(branch, result)
        if len(output.token_ids) > room:
            output = await write(branch, result.shorten(len(result.output) * room // (2 * len(output.token_ids))))
        return output

    async def _write_block(self, branch: BranchText, result: CallResult) -> Output:
        """Return the output as a fenced block within the model's turn."""
        text = result.format(branch.parent.solution + branch.text)
        return Output(text, await self._tokenize(branch, text), result)

    async def _write_turn(self, branch: BranchText, result: CallResult) -> Output:
        """Return the output as the tool's message of the chat template, after which the model's next turn begins."""
        messages = self._messages[branch.parent.policy]
        if branch.has_ended_turn:
            before = messages.after_turn
        elif self.reader.ends_own(branch.texts_between_outputs[-1]):
            before = messages.after_call
        else:  # the server does not return the token that ends a turn
            before = messages.at_turn_end
        tokens = before + await self._tokenize(branch, messages.write(result.output)) + messages.next_turn
        return Output(result.format(branch.parent.solution + branch.text), tokens, result, messages.next_turn)

    async def _tokenize(self, branch: BranchText, text: str) -> Tokens:
        """Return the tokens of a text, in which delimiters of the chat template are spelled and thus have no effect."""
        model = self._policies[branch.parent.policy].model.id

        async def tokenize(piece: str) -> Tokens:
            async with self._requests:
                return await self._engine.tokenize(TokenizeRequest(model, piece, special=False))

        parts = await asyncio.gather(*(tokenize(piece) for piece in _DELIMITER.split(text)))
        return tuple(token for part in parts for token in part)
