"""The alternatives of a result: the best solutions of the answers that come after the chosen one, no answer twice.

A vote ranks answers by their share. Otherwise they rank by the best score of a solution that states them, of equal or
unscored ones by the number of these; in a tournament, and among the client's own candidates, by the best place. Only
there a solution without an answer takes part, as an answer of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from reasoner.answers.votes import group_equivalent
from reasoner.jobs.spec import JobSpec
from reasoner.search.candidates import select_candidates
from reasoner.search.search import Search
from reasoner.strategies.base import AnswerLeader, Choice
from reasoner.tree import Node


async def find_alternatives(search: Search, choice: Choice) -> list[AnswerLeader]:
    """Return as many alternatives as the job asks for, the best first; fewer if there are not so many answers."""
    rivals = list_rivals(search.spec, search.root, choice)
    groups = await group_equivalent(rivals, search.spec.answer, search.equivalence) if rivals else []
    return choose_alternatives(search.spec, choice, rivals, groups)


def list_rivals(spec: JobSpec, root: Node, choice: Choice) -> list[Node]:
    """Return the solutions from which alternatives are chosen, the chosen one first; none if a vote has ranked them."""
    if not spec.alternatives or choice.node is None or choice.leaders is not None:
        return []
    ranked = [row["node"] for row in choice.standings] or [row.node for row in choice.ranking]
    if ranked:
        nodes = {node.id: node for node in root.walk()}
        rivals = [nodes[name] for name in ranked]
    else:
        rivals = sorted(select_candidates(root.walk(), spec), key=_rank_by_score)
    return [choice.node, *(node for node in rivals if node is not choice.node)]


def choose_alternatives(
    spec: JobSpec, choice: Choice, rivals: Sequence[Node], groups: Sequence[Sequence[Node]]
) -> list[AnswerLeader]:
    """Return the alternatives. ``groups``: rivals with equivalent answers, in the order of their first members."""
    if not spec.alternatives or choice.node is None:
        return []
    if choice.leaders is not None:
        return [leader for leader in choice.leaders if leader.node is not choice.node][: spec.alternatives]
    classes = [list(group) for group in groups]
    if choice.standings or choice.ranking:
        by_text: dict[str, list[Node]] = {}
        for node in rivals:
            if node.answer is None:
                by_text.setdefault(node.solution.strip(), []).append(node)
        classes = sorted([*classes, *by_text.values()], key=lambda group: rivals.index(group[0]))
    else:
        classes.sort(key=lambda group: (_rank_by_score(group[0])[0], -len(group)))
    others = [group[0] for group in classes if choice.node not in group]
    return [AnswerLeader(node) for node in others[: spec.alternatives]]


def _rank_by_score(node: Node) -> tuple[float, bool, tuple[int, ...]]:
    """Return a key that sorts the best solution first, of equal scores a strict answer."""
    return (1.0 if node.score is None else -node.score, node.answer_level != "strict", node.path)
