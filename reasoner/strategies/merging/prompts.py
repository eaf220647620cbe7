"""Prompts that show a model several solutions of a problem: the job's, the model's own, or the ones shipped here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
PromptName = Literal["aggregate", "select", "report"]
_FOLDER = Path(__file__).parent / "templates"


def _parse(source: str) -> PromptTemplate:
    return PromptTemplate(source, ("problem", "solutions"), ("problem", "solutions", "count", "report"))


def _check_template(source: str) -> str:
    _parse(source)
    return source


def list_variables(source: str) -> Collection[str]:
    """Return the variables that a template uses."""
    return _parse(source).variables


_Template = Annotated[str, Field(min_length=1, max_length=MAX_PROBLEM_CHARS), AfterValidator(_check_template)]
OptionalTemplate = Annotated[
    _Template | None,
    Field(description="Prompt as a Jinja template with problem, solutions and count; without it the model's own."),
]


@cache
def _read_template(name: PromptName) -> str:
    return (_FOLDER / f"{name}.jinja").read_text()


class MergingPrompt:
    """Begins conversations in which a policy sees solutions of the job's question."""

    def __init__(
        self,
        search: Search,
        name: PromptName,
        source: str | None,
        *,
        is_solution: bool = True,
        policy: int = 0,
        report: str = "",
    ) -> None:
        """``is_solution``: the conversation answers the question itself, instead of judging its solutions.

        ``policy`` is the index of the policy that goes on, ``report`` a comparison of the solutions that it sees, too.
        Raises ``InvalidRequest`` for a template of the model's that cannot be used.
        """
        model = search.policies[policy].model
        notes = model.extra.get(NOTE)
        own = notes.get(name) if isinstance(notes, Mapping) else None
        try:
            self._template = _parse(source or (own if isinstance(own, str) else _read_template(name)))
            if report and "report" not in self._template.variables:  # the model's own shows none
                self._template = _parse(_read_template(name))
        except TemplateRefused as error:
            raise InvalidRequest(f"model {model.id!r}: its {NOTE!r}: {error}", "model") from None
        self._search = search
        self._policy, self._context, self._report = policy, model.context, report
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
            if len(await self._search.tokenize(messages, self._policy)) + longest <= self._context:
                node = await self._search.start_conversation(
                    parent, messages, is_solution=self._is_solution, policy=self._policy
                )
                return node, shown
            shown.pop()
        return None

    def _write(self, texts: Sequence[str]) -> list[dict[str, str]]:
        *earlier, question = self._search.spec.to_messages()
        values = {"problem": question["content"], "solutions": texts, "count": str(len(texts)), "report": self._report}
        return [*earlier, {"role": "user", "content": self._template.render(values)}]
