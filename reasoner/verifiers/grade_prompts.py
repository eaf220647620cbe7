"""Prompts of questions for grades: what is graded first, then the question, then the beginning of the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from engine.adapters.judge import find_judge
from engine.protocol.types import Capability, InvalidRequest, KeyBound, ModelInfo, TokenizeRequest, Tokens
from prm.formats.base import as_text
from prm.scorers.grades import ANSWER_ALONE, GradeQuestion
from prm.scorers.next_turn import encode_next_turn
from prm.scorers.templates import PromptTemplate
from prm.scorers.verdict_formats import parse_check_template, parse_compare_template, read_prompt
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.verifier_specs import GradedVerifier
from reasoner.thoughts import ThoughtFormat
from reasoner.tree import Node
from reasoner.verifiers.context import VerifierContext


def wrote_branches(model: ModelInfo, context: VerifierContext) -> bool:
    """Return True if a model, or the base of an adapter, wrote all branches, so that it can be asked in place."""
    return context.spec.models is None and context.policy.id in (model.id, model.parent)


class GradePrompts:
    """Writes the prompts of one job."""

    def __init__(
        self, context: VerifierContext, model: ModelInfo, lead: Tokens, thoughts: ThoughtFormat | None
    ) -> None:
        """Raises ``InvalidRequest`` where ``in_place`` is impossible."""
        verifier = context.spec.verifier
        assert isinstance(verifier, GradedVerifier)
        self._context = context
        self._model = model
        self._lead = lead
        self._thoughts = None if thoughts is None or thoughts.is_told else thoughts
        self._reads = verifier.reads
        self._problem = _describe_problem(context.spec)
        self._turns: dict[str, Tokens] = {}
        self._judge = find_judge(model)
        is_in_place = wrote_branches(model, context) if verifier.in_place is None else verifier.in_place
        if self._judge is not None:
            _check_judge(verifier, model, is_in_place=is_in_place and model.id != context.policy.id)
        if is_in_place and not wrote_branches(model, context):
            raise InvalidRequest(
                f"verifier.in_place: only the model that wrote a branch can be asked behind it, and {model.id!r} is "
                "another one, or one of several: leave 'in_place' out",
                "verifier.in_place",
            )
        can_continue = Capability.CONTINUATION in model.capabilities
        self.reads_branch = is_in_place and can_continue
        """True if prompts are the branches themselves, with the question behind them."""
        self._reads_conversation = is_in_place and not can_continue
        self._single: PromptTemplate = parse_check_template(read_prompt("grade"), has_criteria=True)
        self._pair: PromptTemplate = parse_compare_template(read_prompt("grade_pair"), has_criteria=True)

    def is_readable(self, node: Node) -> bool:
        """Return True if the node has text that is shown to the model."""
        if self.reads_branch:
            return bool(node.solution.strip())
        return bool(node.read_text(self._reads).strip())

    async def encode(self, node: Node, question: GradeQuestion) -> Tokens:
        """Return the prompt of a question about one solution."""
        if self.reads_branch:
            return await self._encode_behind(node, question)
        if self._reads_conversation:
            answer = {"role": "assistant", "content": node.read_text(self._reads).strip()}
            messages = [
                *self._context.spec.to_messages(),
                answer,
                {"role": "user", "content": self._phrase_question(question)},
            ]
            return await self._encode_chat(messages)
        values = {"question": self._problem, "solution": node.read_text(self._reads).strip()}
        return await self._encode_prompt(self._single, values, question)

    async def encode_pair(self, first: Node, second: Node, number: int, question: GradeQuestion) -> Tokens:
        """Return the prompt of a question about solution ``number`` (1 or 2) of a pair.

        An adapter that was trained to judge is asked about each alone.
        """
        if self._judge is not None:
            return await self._encode_behind((first, second)[number - 1], question)
        texts = [node.read_text(self._reads).strip() for node in (first, second)]
        values = {"question": self._problem, "first": texts[0], "second": texts[1]}
        return await self._encode_prompt(self._pair, values, question)

    def find_key_bound(self, node: Node) -> KeyBound | None:
        """Return the bound on the keys that a question about a solution goes on with."""
        return self._context.find_branch_bound(node, self._model) if self.reads_branch else None

    def find_pair_bound(self, first: Node, second: Node, number: int) -> KeyBound | None:
        """Return the same of a question about a pair, see ``encode_pair``."""
        return self.find_key_bound((first, second)[number - 1]) if self._judge is not None else None

    async def encode_empty(self, question: GradeQuestion) -> Tokens:
        """Return the prompt of a question about an empty solution."""
        if self.reads_branch:
            return await self._encode_turn(question)
        return await self._encode_prompt(self._single, {"question": self._problem, "solution": ""}, question)

    async def _encode_behind(self, node: Node, question: GradeQuestion) -> Tokens:
        """Return the branch's own tokens with the question as its next turn; an open thought is closed before it.

        An adapter that was trained to judge is asked its own question, directly behind the branch.
        """
        prefix = node.prefix[:-1] if node.ended_with_eos else node.prefix
        if self._judge is not None:
            return prefix + self._judge.invocation
        if node.thought == "open" and self._thoughts is not None:
            prefix += self._thoughts.forced_ids
        return prefix + await self._encode_turn(question)

    async def _encode_turn(self, question: GradeQuestion) -> Tokens:
        if self._judge is not None:
            return self._judge.invocation
        if question.text not in self._turns:
            turn = await encode_next_turn(
                self._context.engine, self._model.id, question.text, self._context.spec.chat_template_kwargs
            )
            self._turns[question.text] = self._begin_answer(turn)
        return self._turns[question.text]

    async def _encode_prompt(
        self, template: PromptTemplate, values: Mapping[str, str], question: GradeQuestion
    ) -> Tokens:
        text = template.render({**values, "criterion": self._phrase_question(question)})
        return await self._encode_chat([{"role": "user", "content": text}])

    async def _encode_chat(self, messages: Sequence[dict[str, str]]) -> Tokens:
        return self._begin_answer(await self._context.engine.tokenize(TokenizeRequest(self._model.id, messages)))

    def _phrase_question(self, question: GradeQuestion) -> str:
        """Return the question's text; where no lead begins the answer, with what is to be written."""
        return question.text if self._lead else f"{question.text} {ANSWER_ALONE}"

    def _begin_answer(self, prompt: Tokens) -> Tokens:
        """Return the prompt with the beginning of the answer; a thought that the template opens is closed first."""
        if self._lead and self._thoughts is not None and self._thoughts.find_state(prompt) == "open":
            prompt += self._thoughts.forced_ids
        return prompt + self._lead


def _check_judge(verifier: GradedVerifier, model: ModelInfo, *, is_in_place: bool) -> None:
    """Raise ``InvalidRequest`` for fields that an adapter with a question of its own cannot serve."""
    field = "criteria" if verifier.criteria else "repeats" if verifier.repeats > 1 else None
    if not is_in_place:
        field = "in_place" if verifier.in_place is False else "model"
    if field is not None:
        raise InvalidRequest(
            f"verifier.{field}: adapter {model.id!r} was trained on one question behind branches of {model.parent!r}: "
            f"leave 'criteria', 'repeats' and 'in_place' out, and let {model.parent!r} alone write the solutions",
            f"verifier.{field}",
        )


def _describe_problem(spec: JobSpec) -> str:
    """Return the question as a text, with the functions that a turn may call."""
    problem = as_text(spec.rendered_conversation)
    if not spec.functions:
        return problem
    declared = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in spec.functions]
    lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in declared)
    return f"{problem}\n\nFunctions that may be called:\n{lines}"
