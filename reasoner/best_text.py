"""The best finished text of a search, for questions to which solutions state no answer.

A vote without voters, and scores of solutions of which none states its answer strictly, are about texts as a whole:
then every finished solution takes part, whether or not it ends in a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from reasoner.jobs.spec import JobSpec
from reasoner.search.candidates import list_finished
from reasoner.search.search import Search
from reasoner.strategies.base import Choice, DecidedBy, read_answer
from reasoner.strategies.registry import STRATEGIES
from reasoner.tree import Node


async def choose_text(search: Search, choice: Choice) -> Choice:
    """Return the choice, or that of the best finished text, by the verifier, else by its mean log-probability.

    Texts take part where the strategy chose nothing, and where it chose by a score among answers that are only the last
    number or letter of a solution. The score is then the confidence.
    """
    if _is_settled(search.spec, choice):
        return choice
    await search.score_finished()
    best = find_best_text(search.spec, search.root.walk())
    if best is None or best is choice.node:
        return choice
    votes = STRATEGIES[search.spec.strategy.name].decided_by is DecidedBy.VOTE
    return replace(choice, node=best, confidence=None if votes else best.score)


def find_best_text(spec: JobSpec, nodes: Iterable[Node]) -> Node | None:
    """Return the best finished solution; ``None`` if none has a text that may be the result."""
    texts = [node for node in list_finished(nodes) if read_answer(node).strip()]
    if spec.functions:  # what a solution says in words is its answer, and one without any calls functions wrongly
        texts = [node for node in texts if node.answer is not None]
    return max(texts, key=lambda node: (-1.0 if node.score is None else node.score, node.mean_logprob), default=None)


def _is_settled(spec: JobSpec, choice: Choice) -> bool:
    if spec.candidates is not None:  # nobody's likelihood is known
        return True
    if choice.node is None:
        return False
    decides_by_score = STRATEGIES[spec.strategy.name].decided_by is DecidedBy.BEST and not choice.standings
    return not decides_by_score or choice.node.answer_level == "strict" or spec.has_conclusive_verifier
