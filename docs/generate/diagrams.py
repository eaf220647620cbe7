"""The diagrams of the documentation, ``docs/images/*.svg``."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "images"
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2733}"
    ".small{font-size:11px;fill:#5a6675}"
    ".box{fill:#eef2f8;stroke:#8796ab}"
    ".store{fill:#fdf3dc;stroke:#b8963f}"
    ".fast{fill:#e6f4ea;stroke:#6aa57a}"
    ".dead{fill:#fbe4e4;stroke:#c06a6a}"
    ".arrow{stroke:#5a6675;fill:none;marker-end:url(#head)}"
    ".late{stroke-dasharray:4 3}"
)
_HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#5a6675"/></marker>'
)


@dataclass
class Drawing:
    """Boxes and arrows on a white sheet. Coordinates are pixels; a box is named by its title."""

    width: int
    height: int
    parts: list[str] = field(default_factory=list)
    boxes: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)

    def box(self, title: str, x: int, y: int, width: int, *lines: str, kind: str = "box") -> None:
        """Draw a box with a title and smaller lines below it."""
        height = 30 + 15 * len(lines)
        self.boxes[title] = (x, y, width, height)
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>')
        self.text(title, x + width // 2, y + 20)
        for index, line in enumerate(lines):
            self.text(line, x + width // 2, y + 36 + 15 * index, small=True)

    def text(self, text: str, x: int, y: int, *, small: bool = False, anchor: str = "middle") -> None:
        kind = ' class="small"' if small else ""
        self.parts.append(f'<text{kind} x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    def caption(self, y: int, *lines: str) -> None:
        """Write centred lines below each other."""
        for index, line in enumerate(lines):
            self.text(line, self.width // 2, y + 18 * index, small=True)

    def across(self, start: str, end: str, label: str = "", *, dy: int = 0) -> None:
        """Draw a level arrow from a box to another beside it; ``dy`` shifts it from the middle of the first."""
        x, y, width, height = self.boxes[start]
        end_x, _, end_width, _ = self.boxes[end]
        x1, x2 = (x + width, end_x) if end_x > x else (x, end_x + end_width)
        self.line(x1, y + height // 2 + dy, x2, y + height // 2 + dy, label)

    def down(self, start: str, end: str, label: str = "") -> None:
        """Draw an arrow from the bottom of a box to the top of another."""
        x, y, width, height = self.boxes[start]
        self.line(x + width // 2, y + height, x + width // 2, self.boxes[end][1], label)

    def line(self, x1: int, y1: int, x2: int, y2: int, label: str = "", *, kind: str = "") -> None:
        self.parts.append(f'<path class="arrow {kind}" d="M{x1} {y1}L{x2} {y2}"/>')
        if label and x1 == x2:
            self.text(label, x1 + 8, (y1 + y2) // 2 + 4, small=True, anchor="start")
        elif label:
            self.text(label, (x1 + x2) // 2, (y1 + y2) // 2 - 6, small=True)

    def svg(self) -> str:
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        sheet = f'<rect width="{self.width}" height="{self.height}" rx="8" fill="#fff"/>'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
                f"<style>{_STYLE}</style><defs>{_HEAD}</defs>",
                sheet,
                *self.parts,
                "</svg>\n",
            ]
        )


def job() -> Drawing:
    """Draw a job's way from POST to answer."""
    drawing = Drawing(860, 330)
    drawing.box("client", 20, 60, 100, "curl, CLI,", "OpenAI client")
    drawing.box("api", 210, 60, 150, "parse, authenticate,", "resolve, store")
    drawing.box("Redis", 450, 60, 160, "jobs, queues, leases,", "journals, events", kind="store")
    drawing.box("worker", 700, 60, 140, "claim, heartbeat,", "finish")
    drawing.box("search", 700, 190, 140, "strategy, budget,", "tree, replay")
    drawing.box("engine", 450, 190, 160, "policy: generate", "PRM: score steps", kind="fast")
    drawing.across("client", "api", "POST", dy=-12)
    drawing.across("api", "client", "202, events", dy=14)
    drawing.across("api", "Redis", "enqueue", dy=-12)
    drawing.across("Redis", "api", "events", dy=14)
    drawing.across("Redis", "worker", "wake, claim", dy=-12)
    drawing.across("worker", "Redis", "result, bill", dy=14)
    drawing.down("worker", "search", "run_job")
    drawing.across("search", "engine", "requests", dy=-12)
    drawing.across("engine", "search", "results", dy=14)
    drawing.line(700, 192, 612, 122)
    drawing.text("journal entry first", 634, 176, small=True)
    drawing.caption(
        285,
        "Each result of the engine is appended to the journal before the strategy sees it;",
        "the same entries are the client's events and the account behind the bill.",
    )
    return drawing


def token() -> Drawing:
    """Draw a token's way through the engine."""
    drawing = Drawing(860, 300)
    drawing.box("request", 20, 40, 110, "prompt token ids,", "sampling, seed")
    drawing.box("scheduler", 180, 40, 130, "admit, chunk,", "preempt")
    drawing.box("runner", 360, 40, 130, "batch, forward", "pass")
    drawing.box("sampler", 540, 40, 130, "processors, truncation,", "argmax + noise")
    drawing.box("commit", 720, 40, 120, "append, keep or", "reject drafts")
    drawing.box("radix tree", 180, 170, 130, "cached prefixes,", "pins", kind="store")
    drawing.box("paged KV", 360, 170, 130, "pages of 16 tokens", kind="store")
    drawing.box("drafter", 540, 170, 130, "draft tokens of", "the next step", kind="fast")
    drawing.box("events", 720, 170, 120, "text, token ids,", "log-probabilities")
    for start, end in (("request", "scheduler"), ("scheduler", "runner"), ("runner", "sampler"), ("sampler", "commit")):
        drawing.across(start, end)
    drawing.down("scheduler", "radix tree", "match")
    drawing.down("runner", "paged KV", "read, write")
    drawing.down("commit", "events", "emit")
    drawing.line(735, 102, 640, 170, "")
    drawing.line(540, 180, 300, 102, "", kind="late")
    drawing.caption(
        262,
        "One step loop per model: schedule, forward, sample, commit. Draft tokens are scheduled beside",
        "the token that is due (dashed), and kept if they are the tokens that the sampler draws there.",
    )
    return drawing


def durability() -> Drawing:
    """Draw how another worker replays the journal of a dead one."""
    drawing = Drawing(860, 240)
    drawing.box("worker A", 20, 30, 200, "claims the job, searches")
    drawing.box("kill -9", 250, 30, 90, "", kind="dead")
    drawing.box("lease runs out", 370, 30, 130, "3 s without heartbeat")
    drawing.box("worker B", 530, 30, 310, "claims; replays entries 1 … 41; asks for 42, …")
    drawing.box(
        "journal in Redis",
        20,
        130,
        820,
        "1 … 41 written by A, each before A's strategy saw it   |   42 … written by B",
        kind="store",
    )
    drawing.down("worker A", "journal in Redis", "append")
    drawing.line(600, 130, 600, 75, "read 1 … 41")
    drawing.line(760, 75, 760, 130, "append")
    drawing.across("worker A", "kill -9")
    drawing.across("kill -9", "lease runs out")
    drawing.across("lease runs out", "worker B")
    drawing.caption(
        215,
        "A late write of worker A is refused: it no longer holds the lease. Entries 1 … 41 are not paid for twice.",
    )
    return drawing


def layers() -> Drawing:
    """Draw the packages, bottom-up, and the processes that run them."""
    drawing = Drawing(860, 305)
    rows = (
        ("api", "HTTP, OpenAI's routes, page, command line", "box"),
        ("workers", "Celery tasks, job store, journal, leases, settings", "box"),
        ("reasoner", "jobs, budgets, search tree, strategies, verifiers, answers, evaluation", "box"),
        ("prm", "process reward models: formats, scoring, training", "box"),
        ("engine", "cache, scheduler, runner, sampler, speculation, server, client", "fast"),
        ("kernels", "numerical kernels: torch, numba, Triton", "fast"),
    )
    for index, (name, text, kind) in enumerate(rows):
        drawing.box(name, 30, 15 + 48 * index, 560, kind=kind)
        x, y, width, _ = drawing.boxes[name]
        drawing.parts.pop()
        drawing.text(name, x + 14, y + 20, anchor="start")
        drawing.text(text, x + width - 12, y + 20, small=True, anchor="end")
    drawing.line(610, 20, 610, 285, "")
    drawing.text("imports only", 622, 150, small=True, anchor="start")
    drawing.text("what is below", 622, 165, small=True, anchor="start")
    drawing.text("no torch: api, workers,", 720, 60, small=True, anchor="start")
    drawing.text("reasoner, engine.remote,", 720, 75, small=True, anchor="start")
    drawing.text("engine.protocol,", 720, 90, small=True, anchor="start")
    drawing.text("prm.scorers", 720, 105, small=True, anchor="start")
    return drawing


DRAWINGS = {"job.svg": job, "token.svg": token, "durability.svg": durability, "layers.svg": layers}
