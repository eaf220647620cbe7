"""Candidates: the solutions among which a search chooses."""

from __future__ import annotations

from collections.abc import Iterable

from reasoner.jobs.spec import JobSpec
from reasoner.tree import Node


def select_candidates(nodes: Iterable[Node], spec: JobSpec) -> list[Node]:
    """Return the nodes among which a search chooses, in the order of their paths.

    Nodes with a flexible answer are candidates only if no node has a strict one, or if the verifier's score is a fact.
    """
    stated = sorted((node for node in nodes if node.answer is not None), key=lambda node: node.path)
    strict = [node for node in stated if node.answer_level == "strict"]
    return strict if strict and not spec.has_conclusive_verifier else stated
