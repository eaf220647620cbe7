"""The best result in a job's journal, for a job that ends before its search does.

It is chosen without a model, and answers are equal only if their canonical texts are. So it is available at once to
any process with the journal, whether or not a worker runs the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from reasoner.alternatives import choose_alternatives, list_rivals
from reasoner.answers.votes import count_votes, find_vote_form
from reasoner.best_text import find_best_text
from reasoner.budget.usage import Usage
from reasoner.jobs.job import Alternative, FinishReason, JobResult, TokenProbability
from reasoner.jobs.journal import Entry
from reasoner.jobs.messages import CalledFunction
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.view import fold_events
from reasoner.search.candidates import select_candidates
from reasoner.search.replay import bill_model
from reasoner.strategies.base import (
    AnswerLeader,
    Choice,
    DecidedBy,
    choose_best_scored,
    count_abstained,
    elect,
    weigh_by_score,
)
from reasoner.strategies.registry import STRATEGIES
from reasoner.thoughts import strip_delimiters
from reasoner.tree import Node, find_most_promising

Logprobs = Mapping[str, list[TokenProbability] | None]
"""Log-probabilities of solutions by node."""


def choose_best_so_far(spec: JobSpec, entries: Iterable[Entry]) -> JobResult | None:
    """Return the result of a job that was cancelled, or ``None`` if its search had not begun.

    The answer is chosen as by the strategy: by a vote, weighted by scores where there are any, or by the best score.
    Without an answer the text is that of the best finished solution, or else of the best branch so far.
    """
    entries = list(entries)
    root = fold_events(entries).root
    strategy = STRATEGIES.get(spec.strategy.name)
    if not root.children or strategy is None:  # an unknown strategy is one of another version
        return None
    candidates = select_candidates(root.walk(), spec)
    by = spec.strategy.params.get("by")
    is_vote = strategy.decided_by is DecidedBy.VOTE and by not in ("verifier", "tournament")
    choice = _vote(spec, root, candidates) if is_vote else choose_best_scored(candidates)
    if choice.node is None and spec.candidates is None:
        choice = replace(choice, node=find_best_text(spec, root.walk()))
    rivals = list_rivals(spec, root, choice)
    others = choose_alternatives(spec, choice, rivals, _group(spec, rivals))
    usages: dict[str, Usage] = {}
    for entry in entries:
        bill_model(usages, entry)
    return build_result(
        spec, root, choice=choice, finish_reason="cancelled", usage_by_model=usages, alternatives=others
    )


def build_result(
    spec: JobSpec,
    root: Node,
    choice: Choice,
    finish_reason: FinishReason,
    usage_by_model: Mapping[str, Usage],
    alternatives: Sequence[AnswerLeader] = (),
    logprobs: Logprobs | None = None,
    note: str | None = None,
) -> JobResult:
    """Return the result with the chosen solution; without one, its text is that of the most promising branch.

    ``logprobs``: those of its solutions, by node. ``note``: what to know about the choice.
    """
    logprobs = logprobs or {}
    shown = choice.node or find_most_promising(root)
    thought, content = (None, None) if shown is None else _split_solution(spec, shown)
    return JobResult(
        answer=choice.node and choice.node.answer,
        answer_level=choice.node and choice.node.answer_level,
        text=shown and shown.solution,
        thought=thought,
        content=content,
        tool_calls=[] if choice.node is None else _list_calls(choice.node),
        confidence=choice.confidence,
        votes=choice.votes,
        abstained=choice.abstained,
        finish_reason=finish_reason,
        note=note,
        node=shown and shown.id,
        logprobs=logprobs.get(shown.id) if shown else None,
        alternatives=[_describe(spec, leader, logprobs.get(leader.node.id)) for leader in alternatives],
        ranking=list(choice.ranking),
        usage_by_model=dict(usage_by_model),
    )


def _describe(spec: JobSpec, leader: AnswerLeader, logprobs: list[TokenProbability] | None) -> Alternative:
    node = leader.node
    thought, content = _split_solution(spec, node)
    return Alternative(
        answer=node.answer,
        answer_level=node.answer_level,
        text=node.solution,
        thought=thought,
        content=content,
        tool_calls=_list_calls(node),
        share=leader.share,
        score=node.score,
        node=node.id,
        logprobs=logprobs,
    )


def _split_solution(spec: JobSpec, node: Node) -> tuple[str | None, str | None]:
    """Return a solution's thought, and what follows it without calls; ``None`` for what is not told apart."""
    if node.thought is None:
        has_turns = len(node.reply_text) < len(node.solution)
        return None, node.reply_text.strip("\n") if node.content is None and has_turns else node.content
    own = (spec.thoughts.open, spec.thoughts.close) if spec.thoughts is not None else None
    content = node.reply_text.strip("\n") if node.content is None else node.content
    return strip_delimiters(node.thought_text, own), content


def _list_calls(node: Node) -> list[CalledFunction]:
    return [CalledFunction(name=name, arguments=arguments) for name, arguments in node.calls]


def _vote(spec: JobSpec, root: Node, candidates: Sequence[Node]) -> Choice:
    weights = weigh_by_score(candidates)
    return elect(count_votes(_group(spec, candidates), weights), weights, count_abstained(root.walk(), candidates))


def _group(spec: JobSpec, candidates: Sequence[Node]) -> list[list[Node]]:
    """Group solutions by the canonical text of their answers."""
    groups: dict[str, list[Node]] = {}
    for node in candidates:
        if node.answer is not None:
            groups.setdefault(find_vote_form(node, spec.answer.compare), []).append(node)
    return list(groups.values())
