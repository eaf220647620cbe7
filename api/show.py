"""Jobs and trees on a terminal. Model text is printed as text: rich markup in it has no effect."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from api.client import ServiceClient
from reasoner.jobs import TERMINAL, Event, Job

DEEPEST_WIDTH = 60
"""Characters of a step that fit on a line of the tree."""


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
        elif event.type.removeprefix("job.") in TERMINAL:
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


def follow(client: ServiceClient, job: Job, console: Console) -> None:
    """Shows the job's progress until it ends."""
    progress = Progress()
    with Live(Text(progress.line()), console=console, refresh_per_second=8, transient=True) as live:
        for event in client.events(job.id):
            progress.take(event)
            live.update(Text(progress.line()))


def print_job(console: Console, job: Job) -> None:
    """The result and the bill."""
    usage, result = job.usage, job.result
    console.print(Text(f"{job.id}  {job.status}", style="bold"))
    if job.error is not None:
        console.print(Text(f"  {job.error.code}: {job.error.message}", style="red"))
    if result is not None:
        console.print(
            Text(f"  answer      {result.answer if result.answer is not None else '(none)'}", style="bold green")
        )
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


def print_tree(console: Console, tree: dict[str, Any], *, most: int = 40) -> None:
    """The search tree: scores, steps, pruned branches dim, the chosen path bold. Long trees are cut, and say so."""
    nodes = {node["id"]: node for node in tree["nodes"]}
    best = tree.get("best")
    chosen = {best[:end] for end in range(len(best) + 1) if end == len(best) or best[end] == "."} if best else set()
    shown = sorted(nodes.values(), key=lambda node: (node["id"] not in chosen, -(node["score"] or 0.0)))[:most]
    kept = {ancestor for node in shown for ancestor in _lineage(node["id"])}
    root = Tree("search tree")
    drawn: dict[str, Tree] = {"": root}
    for node_id in sorted(kept, key=lambda name: [int(part) for part in name.split(".")]):
        if node_id in nodes:
            parent = drawn.get(nodes[node_id]["parent"], root)
            drawn[node_id] = parent.add(_label(nodes[node_id], node_id in chosen))
    if len(nodes) > len(kept):
        root.add(Text(f"… {len(nodes) - len(kept)} more nodes", style="dim"))
    console.print(root)


def _lineage(node_id: str) -> list[str]:
    parts = node_id.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _label(node: dict[str, Any], chosen: bool) -> Text:
    score = "     " if node["score"] is None else f"{node['score']:.2f} "
    words = " | ".join(part for part in node["text"].split("\n") if part.strip())
    label = Text(score, style="cyan")
    style = "bold green" if chosen else "dim" if node["state"] == "pruned" else ""
    label.append(words if len(words) <= DEEPEST_WIDTH else words[: DEEPEST_WIDTH - 1] + "…", style=style)
    if node["state"] == "pruned":
        label.append(" (pruned)", style="dim")
    return label
