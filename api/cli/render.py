"""Jobs and search trees on a terminal.

Text of models is printed literally: rich's markup and terminal control codes in it have no effect.
"""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from api.http.search_tree import build_tree
from reasoner.client import Client
from reasoner.jobs.job import Job
from reasoner.jobs.view import JobView

MAX_STEP_CHARS = 60
"""Characters of a step that a line of the tree shows."""
MAX_NODES = 40
SHADES = ("#8f6fb5", "#6a7cc0", "#3c8fb5", "#2a9d8f", "#3fa65c")
"""Colours for scores from 0 to 1, readable on light and dark backgrounds."""
MAX_TEXT_CHARS = 4000
"""Characters of an answer or a solution that a result shows."""
MIN_REPETITION_CHARS = 160
"""Shortest repetition of one piece that is shortened; rulers and empty tables are shorter."""
SHOWN_REPEATS = 3
_REPETITION = re.compile(r"(.{1,40}?)\1{11,}", re.DOTALL)
MARGIN_LINES = 6
"""Lines of the terminal that a live tree leaves free."""


def describe_progress(view: JobView) -> str:
    """Return a line with the totals of a job so far."""
    best = "" if view.best_score is None else f", best score {view.best_score:.2f}"
    return (
        f"{view.status}: {view.num_ended} branches, {view.num_answers} answers, {view.num_pruned} pruned, "
        f"{view.tokens} tokens{best}"
    )


def show_progress(client: Client, job: Job, console: Console) -> None:
    """Show a line of progress until the job ends."""
    view = JobView()
    with Live(Text(describe_progress(view)), console=console, refresh_per_second=8, transient=True) as live:
        for event in client.events(job.id):
            view.apply(event)
            live.update(Text(describe_progress(view)))


def watch_tree(client: Client, job: Job, console: Console) -> None:
    """Draw the search tree live until the job ends, on as many lines as the terminal has."""
    view = JobView()

    def render() -> Group:
        max_nodes, is_running = max(1, console.height - MARGIN_LINES), view.status == "in_progress"
        tree = build_tree(job.id, view).model_dump()
        return Group(_draw_tree(tree, max_nodes, is_running), Text(describe_progress(view)))

    with Live(console=console, get_renderable=render, refresh_per_second=8, transient=True):
        for event in client.events(job.id):
            view.apply(event)


def print_job(console: Console, job: Job, *, show_thought: bool = False) -> None:
    """Print the result and the bill, and the thought of the chosen solution if it is asked for."""
    usage, result = job.usage, job.result
    console.print(Text(f"{job.id}  {job.status}", style="bold"))
    if job.error is not None:
        console.print(Text(f"  {job.error.code}: {plain(job.error.message)}", style="red"))
    if job.waiting is not None:
        tries = f"{job.waiting.attempts} attempts so far"
        console.print(Text(f"  waiting     {job.waiting.reason}, {tries}: {plain(job.waiting.detail)}", style="yellow"))
    if result is not None:
        answer = "(none)" if result.answer is None else cut(plain(result.answer))
        level = " (not stated as the answer: the last in the solution)" if result.answer_level == "flexible" else ""
        console.print(Text(f"  answer      {answer}{level}", style="bold green"))
        if result.confidence is not None:
            silent = f" ({result.abstained} without an answer)" if result.abstained else ""
            console.print(Text(f"  confidence  {result.confidence:.2f}{silent}"))
        console.print(Text(f"  ended by    {result.finish_reason}"))
        if result.note is not None:
            console.print(Text(f"  note        {plain(result.note)}", style="yellow"))
        if show_thought and result.thought:
            console.print(Text(f"  thought     {plain(result.thought)}", style="dim"))
        for name, bill in result.usage_by_model.items():
            console.print(Text(f"  {name:<11} {bill.total} tokens, {bill.flops:.3g} FLOPs, cost {bill.cost:.6g}"))
        if result.answer is None and result.text:
            name = "best text" if job.status == "completed" else "unfinished"
            console.print(Text(f"  {name:<11} {cut(plain(result.text).strip())}"))
    thought = f" ({usage.thought} in thoughts)" if usage.thought else ""
    parts = f"{usage.generated} generated{thought}, {usage.verifier_computed} by the verifier"
    console.print(Text(f"  bill        {usage.total} tokens ({parts}), {usage.seconds:.2f} s"))
    saved = f" ({usage.saved} saved by giving up early)" if usage.saved else ""
    console.print(
        Text(f"              {usage.pruned} tokens pruned{saved}, {usage.cached} prompt tokens from the cache")
    )
    if usage.dropped:
        console.print(Text(f"              {usage.dropped} tokens of thoughts dropped from the keys"))
    if usage.tool_calls:
        console.print(Text(f"              {usage.tool_calls} calls of Python, {usage.tool_seconds:.2f} s"))
    if usage.cost:
        console.print(Text(f"              {usage.flops:.3g} FLOPs, cost {usage.cost:.6g}"))
    if usage.drafted:
        console.print(Text(f"              {usage.accepted} of {usage.drafted} draft tokens accepted"))


def print_tree(console: Console, tree: dict[str, Any], *, max_nodes: int = MAX_NODES) -> None:
    """Print the search tree: scores, steps, pruned branches dim, the chosen path bold. Large trees are cut."""
    console.print(_draw_tree(tree, max_nodes, is_running=False))


def plain(text: str) -> str:
    """Return the text for a terminal: control characters replaced but line breaks and tabs, long repetitions shortened.

    A model in a loop writes one piece hundreds of times, which would push everything else off the screen.
    """
    shown = "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
    return _REPETITION.sub(_shorten_repetition, shown)


def cut(text: str) -> str:
    """Return a long text with its middle left out."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters are left out: --json has all …\n{text[-half:]}"


def _shorten_repetition(match: re.Match[str]) -> str:
    piece, count = match[1], len(match[0]) // len(match[1])
    if len(match[0]) < MIN_REPETITION_CHARS:
        return match[0]
    return f"{piece * SHOWN_REPEATS}… [{count} times]"


def _draw_tree(tree: dict[str, Any], max_nodes: int, is_running: bool) -> Tree:
    """Draw at most ``max_nodes``: the chosen path first, then other nodes by score, then pruned ones."""
    nodes = {node["id"]: node for node in tree["nodes"]}
    chosen = set() if tree["best"] is None else set(_list_ancestors(tree["best"]))
    kept: set[str] = set()
    for name in sorted(nodes, key=lambda name: _sort_key(nodes[name], name in chosen)):
        extended = kept.union(_list_ancestors(name))
        if len(extended) <= max_nodes:
            kept = extended
    parents = {node["parent"] for node in nodes.values()}
    root = Tree("search tree")
    branches: dict[str, Tree] = {"": root}
    for name in sorted(kept, key=lambda name: [int(part) for part in name.split(".")]):
        node = nodes[name]
        is_open = node["state"] == "live" or (node["state"] in ("step", "said") and name not in parents)
        branches[name] = branches.get(node["parent"], root).add(_label(node, name in chosen, is_running and is_open))
    if len(nodes) > len(kept):
        root.add(Text(f"… {len(nodes) - len(kept)} more nodes", style="dim"))
    return root


def _sort_key(node: dict[str, Any], is_chosen: bool) -> tuple[bool, bool, float]:
    return (not is_chosen, node["state"] == "pruned", -(node["score"] or 0.0))


def _list_ancestors(node_id: str) -> list[str]:
    parts = node_id.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _label(node: dict[str, Any], is_chosen: bool, is_frontier: bool) -> Text:
    score = node["score"]
    thoughts = [part for part in node.get("parts", ()) if part["kind"] == "thought"]
    shown = node["text"][sum(part["chars"] for part in thoughts) :]
    if node.get("model"):
        shown = f"[{node['model']}] {shown}"
    text = plain(" | ".join(part.strip() for part in shown.split("\n") if part.strip()))
    if thoughts:
        generated = sum(part["tokens"] for part in thoughts if part["origin"] == "generated")
        text = f"[thought, {generated} tokens] {text}" if generated else f"[thought closed by the search] {text}"
    label = Text()
    if score is None:
        label.append("     ")
    else:
        label.append(f"{score:.2f} ", style=SHADES[min(len(SHADES) - 1, int(max(score, 0.0) * len(SHADES)))])
    style = "bold green" if is_chosen else "dim" if node["state"] == "pruned" else ""
    label.append(text if len(text) <= MAX_STEP_CHARS else text[: MAX_STEP_CHARS - 1] + "…", style=style)
    if is_frontier:
        label.append(" …", style="bold")
    if node["state"] == "pruned":
        label.append(" (pruned)", style="dim")
    return label
