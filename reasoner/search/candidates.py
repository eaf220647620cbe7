"""Candidates: the solutions among which a search chooses."""

from __future__ import annotations

from collections.abc import Iterable

from reasoner.jobs.spec import JobSpec
from reasoner.tree import Node


def select_candidates(nodes: Iterable[Node], spec: JobSpec | None) -> list[Node]:
    """Return the nodes among which a search chooses, in the order of their paths.

    Nodes with a flexible answer are candidates only if no node has a strict one, or if the verifier's score is a fact,
    which it is not without a job.
    """
    stated = sorted((node for node in nodes if node.answer is not None), key=lambda node: node.path)
    strict = [node for node in stated if node.answer_level == "strict"]
    is_fact = spec is not None and spec.has_conclusive_verifier
    return strict if strict and not is_fact else stated


def list_finished(nodes: Iterable[Node]) -> list[Node]:
    """Return the solutions that the model ended, whether or not they state an answer, in the order of their paths."""
    ended = (node for node in nodes if node.reason in ("answer", "stop") and node.is_solution)
    return sorted((node for node in ended if node.solution.strip()), key=lambda node: node.path)
