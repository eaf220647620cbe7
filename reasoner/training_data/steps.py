"""Rows for process reward models: the steps of solutions, each with a label."""

from __future__ import annotations

from typing import cast

from reasoner.jobs.step_specs import DEFAULT_SEPARATOR
from reasoner.jobs.view import NodeView
from reasoner.training_data.labels import By, choose_reward, is_right
from reasoner.training_data.recorded_job import LeftOut, RecordedJob
from reasoner.training_data.rows import PrmRow

Step = tuple[str, bool]


def build_prm(job: RecordedJob, by: By | None) -> list[PrmRow]:
    """Return the steps of each solution.

    By scores a step is right if the verifier's score of it is. By answers the steps are the branches of the tree, and
    one is right if a solution below it is (Wang et al. 2024, Math-Shepherd, section 3.3, hard estimation).
    """
    prompt = _write_prompt(job)
    reward, rows = choose_reward(job, by), list[PrmRow]()
    by_score = by == "score" or (by is None and any(node.score is not None for node in job.view.nodes.values()))
    rewards = {node: value for node in job.solutions if (value := reward(node)) is not None}
    for node in job.solutions:
        lineage = cast("list[NodeView]", node.lineage())
        labelled = [_label_by_score(step) if by_score else _label_by_answers(step, rewards) for step in lineage]
        steps = [step for own in labelled for step in own or ()]
        if steps and None not in labelled and not any(step.trimmed_chars for step in lineage):
            completions, labels = [text for text, _ in steps], [label for _, label in steps]
            rows.append({**job.columns, "prompt": prompt, "completions": completions, "labels": labels})
    if not rows:
        raise LeftOut("no_label")
    return rows


def _write_prompt(job: RecordedJob) -> str:
    """Return the client's question as one text, as TRL's trainer of process reward models reads it."""
    assert job.prompt  # raises for questions that have no plain text
    return "\n\n".join(message["content"] for message in job.spec.rendered_conversation)


def _label_by_score(node: NodeView) -> list[Step] | None:
    """Return a branch's steps with labels by their scores; ``None`` if scores are missing.

    The verifier has scored each part between empty lines, or else only the whole branch.
    """
    pieces = [piece.strip() for piece in node.text.split(DEFAULT_SEPARATOR) if piece.strip()]
    if not pieces:
        return []
    if len(pieces) == len(node.step_scores):
        return [(piece, is_right(score)) for piece, score in zip(pieces, node.step_scores, strict=True)]
    return None if node.score is None else [(node.text.strip(), is_right(node.score))]


def _label_by_answers(node: NodeView, rewards: dict[NodeView, float]) -> list[Step] | None:
    """Return a branch as one step that is right if a solution below it is; ``None`` if none of them is known."""
    if not node.text.strip():
        return []
    below = [rewards[leaf] for leaf in cast("list[NodeView]", list(node.walk())) if leaf in rewards]
    return [(node.text.strip(), any(map(is_right, below)))] if below else None
