"""Jobs and trees on a terminal. Model text is printed as text: neither rich's markup nor a terminal's codes in it have
an effect."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from api.http.search_tree import TreeBuilder
from reasoner.client import Client
from reasoner.jobs.event import Event
from reasoner.jobs.job import TERMINAL_STATUSES, Job

WIDTH = 140
"""Characters of a line where no terminal says how many."""
DEEPEST_WIDTH = 60
"""Characters of a step that fit on a line of the tree."""
MOST_NODES = 40
SHADES = ("#8f6fb5", "#6a7cc0", "#3c8fb5", "#2a9d8f", "#3fa65c")
"""From a score of 0 to one of 1, readable on light and dark ground."""
MARGIN = 6
"""Lines of a terminal that a growing tree leaves to others."""


class Progress:
    """What a job's events add up to, while it runs."""

    def __init__(self) -> None:
        self.state = "queued"
        self.branches = 0
        self.answered = 0
        self.pruned = 0
        self.generated = 0
        self.verified = 0
        self.best: float | None = None

    def take(self, event: Event) -> None:
        data: dict[str, Any] = event.data
        if event.type == "node":
            self.generated += data["tokens"]
            self.branches += bool(data["final"])
            self.answered += data["answer"] is not None
        elif event.type == "score":
            self.verified += data["computed"]
            self.best = max(self.best or 0.0, data["score"])
        elif event.type == "prune":
            self.pruned += len(data["nodes"])
        elif event.type in ("job.started", "job.resumed"):
            self.state = "in_progress"
        elif event.type.removeprefix("job.") in TERMINAL_STATUSES:
            self.state = event.type.removeprefix("job.")

    @property
    def tokens(self) -> int:
        return self.generated + self.verified

    def line(self) -> str:
        best = "" if self.best is None else f", best score {self.best:.2f}"
        return (
            f"{self.state}: {self.branches} branches, {self.answered} answers, {self.pruned} pruned, "
            f"{self.tokens} tokens{best}"
        )


def output() -> Console:
    """Where results go: a file or a pipe gets whole tables, whatever size a terminal has by default."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def follow(client: Client, job: Job, console: Console) -> None:
    """Shows the job's progress until it ends."""
    progress = Progress()
    with Live(Text(progress.line()), console=console, refresh_per_second=8, transient=True) as live:
        for event in client.events(job.id):
            progress.take(event)
            live.update(Text(progress.line()))


def watch(client: Client, job: Job, console: Console) -> None:
    """Draws the search tree while it grows, until the job has ended, on as many lines as the terminal has."""
    progress, tree = Progress(), TreeBuilder()

    def picture() -> Group:
        drawn = _drawn(
            tree.build(job.id).model_dump(), max(1, console.height - MARGIN), progress.state == "in_progress"
        )
        return Group(drawn, Text(progress.line()))

    with Live(console=console, get_renderable=picture, refresh_per_second=8, transient=True):
        for event in client.events(job.id):
            progress.take(event)
            tree.add(event)


def print_job(console: Console, job: Job) -> None:
    """The result and the bill."""
    usage, result = job.usage, job.result
    console.print(Text(f"{job.id}  {job.status}", style="bold"))
    if job.error is not None:
        console.print(Text(f"  {job.error.code}: {plain(job.error.message)}", style="red"))
    if result is not None:
        answer = "(none)" if result.answer is None else plain(result.answer)
        console.print(Text(f"  answer      {answer}", style="bold green"))
        if result.confidence is not None:
            console.print(Text(f"  confidence  {result.confidence:.2f}"))
        console.print(Text(f"  ended by    {result.finish_reason}"))
    parts = f"{usage.generated} generated, {usage.verifier_computed} by the verifier"
    console.print(Text(f"  bill        {usage.total} tokens ({parts}), {usage.seconds:.2f} s"))
    console.print(Text(f"              {usage.pruned} tokens pruned, {usage.cached} prompt tokens from the cache"))
    if usage.cost:
        console.print(Text(f"              {usage.flops:.3g} FLOPs, cost {usage.cost:.6g}"))
    if usage.drafted:
        console.print(Text(f"              {usage.accepted} of {usage.drafted} guessed tokens were right"))


def print_tree(console: Console, tree: dict[str, Any], *, most: int = MOST_NODES) -> None:
    """The search tree: scores, steps, pruned branches dim, the chosen path bold. Long trees are cut, and say so."""
    console.print(_drawn(tree, most, running=False))


def plain(text: str) -> str:
    """Text without what a terminal would obey instead of showing it; line breaks and tabs stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _drawn(tree: dict[str, Any], most: int, running: bool) -> Tree:
    """At most so many nodes: the chosen path, then those that still count by their scores, then what was given up."""
    nodes = {node["id"]: node for node in tree["nodes"]}
    chosen = set() if tree["best"] is None else set(_lineage(tree["best"]))
    kept: set[str] = set()
    for name in sorted(nodes, key=lambda name: _rank(nodes[name], name in chosen)):
        more = kept.union(_lineage(name))
        if len(more) <= most:
            kept = more
    parents = {node["parent"] for node in nodes.values()}
    root = Tree("search tree")
    drawn: dict[str, Tree] = {"": root}
    for name in sorted(kept, key=lambda name: [int(part) for part in name.split(".")]):
        node = nodes[name]
        open_ = node["state"] == "live" or (node["state"] in ("step", "said") and name not in parents)
        drawn[name] = drawn.get(node["parent"], root).add(_label(node, name in chosen, running and open_))
    if len(nodes) > len(kept):
        root.add(Text(f"… {len(nodes) - len(kept)} more nodes", style="dim"))
    return root


def _rank(node: dict[str, Any], chosen: bool) -> tuple[bool, bool, float]:
    return (not chosen, node["state"] == "pruned", -(node["score"] or 0.0))


def _lineage(node_id: str) -> list[str]:
    parts = node_id.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _label(node: dict[str, Any], chosen: bool, frontier: bool) -> Text:
    score = node["score"]
    words = plain(" | ".join(part.strip() for part in node["text"].split("\n") if part.strip()))
    label = Text()
    if score is None:
        label.append("     ")
    else:
        label.append(f"{score:.2f} ", style=SHADES[min(len(SHADES) - 1, int(max(score, 0.0) * len(SHADES)))])
    style = "bold green" if chosen else "dim" if node["state"] == "pruned" else ""
    label.append(words if len(words) <= DEEPEST_WIDTH else words[: DEEPEST_WIDTH - 1] + "…", style=style)
    if frontier:
        label.append(" …", style="bold")
    if node["state"] == "pruned":
        label.append(" (pruned)", style="dim")
    return label
