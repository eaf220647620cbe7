"""The page of results: every evaluation that is committed, with what it ran on, and what did not pay."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs.generate.tables import table

_INTRODUCTION = """# Results

Every evaluation whose result file is committed: model, task, strategy and budget, with 95 % intervals, the machine,
the commit and the command. `make docs` writes this page from `results.json` of the folders below `benchmarks/results`,
so a result is added by running its command with `--out` there. What a run did not record is said to be missing. Tokens
are those of one problem, thoughts and the verifier's included.
"""
_NO_PAY = """## What did not pay

Comparisons on the same problems whose whole interval is below zero: the strategy was worse than what it is compared
with.
"""
_UNKNOWN = "not recorded"


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """A result file of one suite."""

    folder: str
    """Its folder below ``benchmarks/results``."""
    suite: str
    command: str
    document: dict[str, Any]
    about: str = ""
    """The settings, as its own table tells them."""

    @property
    def title(self) -> str:
        return f"{_shorten_suite(self.suite)}, {self.models[0]}: {self.folder}"

    @property
    def models(self) -> list[str]:
        """The models of the rows; the first is the one that most of them are of."""
        named = [row.get("model") for row in self.document["rows"]]
        return list(dict.fromkeys(name for name in named if name)) or [str(self.document["settings"]["model"])]


def create_results_page(folder: Path) -> str:
    """Return the page for the results below a folder."""
    evaluations = sorted(_read_all(folder), key=lambda one: (one.suite, one.models[0], one.folder))
    overview = table(
        ("task", "model", "problems", "likeliest answer", "best", "of it", "results"), map(_sum_up, evaluations)
    )
    lost = [row for one in evaluations for row in _list_losses(one)]
    parts = [_INTRODUCTION, overview, *map(_describe, evaluations), _NO_PAY]
    parts.append(table(("task", "model", "strategy", "N", "beside", "difference", "95 % interval"), lost))
    return "\n".join(parts)


def _read_all(folder: Path) -> Iterator[_Evaluation]:
    """Yield the evaluations of a folder: files with rows of one suite, and those with such rows for several tasks."""
    for path in sorted(folder.rglob("results.json")):
        document = json.loads(path.read_text())
        name = path.parent.relative_to(folder).as_posix()
        if not isinstance(document, dict):
            continue
        about, command = _read_heading(path.with_name("table.md"))
        command = document.get("command") or (document.get("origin") or {}).get("command") or command
        if "tasks" in document and "all tasks" in document:
            for each in document["tasks"]:
                compared = [item for item in document["differences"] if item["task"] == each["task"]]
                own = {"comparisons": compared, "settings": {}, "left_out": [], "origin": document.get("origin")} | each
                yield _Evaluation(name, str(each["task"]), command, own)
        elif {"suite", "rows", "settings", "comparisons"} <= document.keys():
            yield _Evaluation(name, str(document["suite"]), command, document, about)


def _read_heading(path: Path) -> tuple[str, str]:
    """Return the line of settings and the command with which a table of an evaluation begins; empty without one."""
    lines = path.read_text().splitlines() if path.exists() else []
    command = next((line.strip() for line in lines if line.startswith("    reasoner ")), "")
    about = next((line for line in lines if " problems, " in line and "; model " in line), "")
    return re.sub(r"(?<=\d)\. .*", ".", about.partition(": ")[2]), command


def _shorten_suite(suite: str) -> str:
    """Return a suite without the folders of its file."""
    return Path(suite).name if suite.endswith((".jsonl", ".csv", ".parquet")) else suite


def _best(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return max(rows, key=lambda row: row["accuracy"])


def _sum_up(one: _Evaluation) -> list[str]:
    """Return a line of the overview: greedy decoding beside the best strategy, ceilings left out."""
    rows = [row for row in one.document["rows"] if row.get("model", one.models[0]) == one.models[0]]
    greedy = next((row for row in rows if row["strategy"] == "greedy"), None)
    best = _best(row for row in rows if not row["strategy"].startswith("pass@"))
    return [
        _shorten_suite(one.suite),
        one.models[0],
        str(one.document["problems"]),
        "" if greedy is None else _format_accuracy(greedy),
        _format_accuracy(best),
        f"`{best['strategy']}` at {best['n']}",
        f"[{one.folder}](#{_make_anchor(one.title)})",
    ]


def _make_anchor(title: str) -> str:
    """Return the anchor that Markdown gives to a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower())).strip("-")


def _format_accuracy(row: dict[str, Any]) -> str:
    return f"{row['accuracy']:.3f} ({row['low']:.3f} – {row['high']:.3f})"


def _describe(one: _Evaluation) -> str:
    """Return the section of an evaluation."""
    origin = one.document.get("origin") or {}
    machine = f"{origin['processor']}, {origin['cores']} cores" if origin else _UNKNOWN
    lines = [f"## {one.title}", "", f"    {one.command or _UNKNOWN}", ""]
    commit, date = origin.get("commit") or _UNKNOWN, origin.get("date", _UNKNOWN)
    lines.append(f"Machine: {machine}. Commit: {commit}. Date: {date}. {one.about}".rstrip())
    rows = one.document["rows"]
    is_matched = any(row.get("budget") is not None for row in rows)
    spent = ("spent",) if is_matched else ("tokens", "verifier", "seconds")
    heads = ("strategy", *(("budget",) if is_matched else ()), "N", "accuracy", "95 % interval", *spent)
    lines += ["", table(heads, (_list_cells(row, one, is_matched=is_matched) for row in rows))]
    failed = one.document["left_out"]
    lines += [f"Left out: {item['problem']} ({item['error']})" for item in failed]
    return "\n".join(lines)


def _list_cells(row: dict[str, Any], one: _Evaluation, *, is_matched: bool) -> Sequence[str]:
    model = row.get("model", one.models[0])
    name = row["strategy"] if model == one.models[0] else f"{row['strategy']} of {model}"
    accuracy = [f"{row['accuracy']:.3f}", f"{row['low']:.3f} – {row['high']:.3f}"]
    if is_matched:
        budget = row.get("budget")
        return [name, "–" if budget is None else f"{budget:g}", str(row["n"]), *accuracy, f"{row['spent']:.4g}"]
    tokens = row["tokens"] + row["verifier_tokens"]
    return [name, str(row["n"]), *accuracy, f"{tokens:.0f}", f"{row['verifier_tokens']:.0f}", f"{row['seconds']:.2f}"]


def _list_losses(one: _Evaluation) -> Iterator[list[str]]:
    """Yield the comparisons that were lost beyond doubt."""
    for item in one.document["comparisons"]:
        if item["high"] < 0:
            yield [
                _shorten_suite(one.suite),
                one.models[0],
                item["strategy"],
                str(item.get("n") or ""),
                ", ".join(filter(None, (item["over"], item.get("what"), item.get("note")))),
                f"{item['difference']:+.3f}",
                f"{item['low']:+.3f} – {item['high']:+.3f}",
            ]
