"""Rows with messages: the chosen solution, pairs of solutions, and single ones with labels."""

from __future__ import annotations

from reasoner.jobs.view import NodeView
from reasoner.training_data.labels import By, choose_reward, is_right
from reasoner.training_data.recorded_job import LeftOut, RecordedJob, has_tool_output, make_completion
from reasoner.training_data.rows import PreferenceRow, SftRow, UnpairedRow


def build_sft(job: RecordedJob) -> list[SftRow]:
    """Return the chosen solution of a completed job that has an answer."""
    if job.document["status"] != "completed" or job.result.get("answer") is None:
        raise LeftOut("no_answer")
    node = job.view.nodes[job.result["node"]]
    prompt = job.prompt
    if has_tool_output(node):
        raise LeftOut("output_of_tools")
    return [{**job.columns, "messages": prompt + make_completion(node)}]


def build_preference(job: RecordedJob, by: By | None, margin: float) -> list[PreferenceRow]:
    """Return pairs of solutions: the best with the worst, the second best with the second worst, and so on, as long as
    their rewards differ by ``margin`` at least, and at all. No solution is in two pairs.
    """
    prompt, rewarded = job.prompt, _list_rewarded(job, by)
    rewarded.sort(key=lambda pair: -pair[1])
    rows: list[PreferenceRow] = []
    for (chosen, high), (rejected, low) in zip(rewarded, reversed(rewarded), strict=True):
        if high <= low or high - low < margin:
            break
        rows.append(
            {
                **job.columns,
                "prompt": prompt,
                "chosen": make_completion(chosen),
                "rejected": make_completion(rejected),
                "score_chosen": high,
                "score_rejected": low,
            }
        )
    if not rows:
        raise LeftOut("no_pair")
    return rows


def build_unpaired(job: RecordedJob, by: By | None) -> list[UnpairedRow]:
    """Return all solutions whose reward is known, with whether they are right."""
    prompt, rewarded = job.prompt, _list_rewarded(job, by)
    if not rewarded:
        raise LeftOut("no_label")
    return [
        {**job.columns, "prompt": prompt, "completion": make_completion(node), "label": is_right(reward)}
        for node, reward in rewarded
    ]


def _list_rewarded(job: RecordedJob, by: By | None) -> list[tuple[NodeView, float]]:
    """Return the solutions whose rewards are known. Of several with one text only the first is there."""
    reward, unique = choose_reward(job, by), dict[str, NodeView]()
    for node in job.solutions:
        unique.setdefault(node.solution.strip(), node)
    pairs = ((node, reward(node)) for node in unique.values())
    return [(node, value) for node, value in pairs if value is not None]
