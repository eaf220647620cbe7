"""Prompts that show a model several solutions of a problem: the job's, the model's own, or the ones shipped here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from engine.protocol.types import InvalidRequest
from prm.scorers.templates import PromptTemplate, TemplateRefused
from reasoner.jobs.messages import MAX_PROBLEM_CHARS
from reasoner.search.search import Search
from reasoner.strategies.base import read_answer
from reasoner.tree import Node

NOTE = "reasoner_merging"
"""Key in a model's config.json: its own templates, by their names."""
PromptName = Literal["aggregate", "select"]
_FOLDER = Path(__file__).parent / "templates"


def _parse(source: str) -> PromptTemplate:
    return PromptTemplate(source, ("problem", "solutions"), ("problem", "solutions", "count"))


def _check_template(source: str) -> str:
    _parse(source)
    return source


_Template = Annotated[str, Field(min_length=1, max_length=MAX_PROBLEM_CHARS), AfterValidator(_check_template)]
OptionalTemplate = Annotated[
    _Template | None,
    Field(description="Prompt as a Jinja template with problem, solutions and count; without it the model's own."),
]


@cache
def _read_template(name: PromptName) -> str:
    return (_FOLDER / f"{name}.jinja").read_text()


class MergingPrompt:
    """Begins conversations in which the policy sees solutions of the job's question."""

    def __init__(self, search: Search, name: PromptName, source: str | None, *, is_solution: bool = True) -> None:
        """``is_solution``: the conversation answers the question itself, instead of judging its solutions.

        Raises ``InvalidRequest`` for a template of the model's that cannot be used.
        """
        notes = search.policy.extra.get(NOTE)
        own = notes.get(name) if isinstance(notes, Mapping) else None
        try:
            self._template = _parse(source or (own if isinstance(own, str) else _read_template(name)))
        except TemplateRefused as error:
            raise InvalidRequest(f"model {search.policy.id!r}: its {NOTE!r}: {error}", "model") from None
        self._search = search
        self._is_solution = is_solution

    async def start(self, parent: Node, solutions: Sequence[Node]) -> tuple[Node, list[Node]] | None:
        """Begin a conversation below ``parent`` that shows the solutions without their thoughts.

        Returns its node and the solutions shown: the first ones that leave room for another one of the longest's
        length. ``None`` if there is no room for any. Earlier turns and the system message stay as they are.
        """
        shown = [node for node in solutions if read_answer(node).strip()]
        longest = max((node.depth_tokens for node in shown), default=0)
        while shown:
            messages = self._write([read_answer(node).strip() for node in shown])
            if len(await self._search.tokenize(messages)) + longest <= self._search.context:
                return await self._search.start_conversation(parent, messages, is_solution=self._is_solution), shown
            shown.pop()
        return None

    def _write(self, texts: Sequence[str]) -> list[dict[str, str]]:
        *earlier, question = self._search.spec.to_messages()
        values = {"problem": question["content"], "solutions": texts, "count": str(len(texts))}
        return [*earlier, {"role": "user", "content": self._template.render(values)}]
