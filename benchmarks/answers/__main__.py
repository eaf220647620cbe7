"""``python -m benchmarks.answers``: correct, wrong and missing answers by style, and pairs of answers by class."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

from benchmarks.answers.measure import measure_choices, measure_hard, measure_pairs, measure_styles, references
from benchmarks.answers.styles import CHOICES, STYLES
from reasoner.evaluation.suites.suite import SuiteError


def main() -> None:
    """Run all measurements and print tables, or with --json one document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.answers", description=__doc__)
    parser.add_argument("--problems", type=Path, help="JSONL in GSM8K's form; generated numbers without it")
    parser.add_argument("--limit", type=int, help="use no more than this many of its answers")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    try:
        numbers = references(arguments.problems)[: arguments.limit]
    except SuiteError as error:
        parser.error(str(error))
    found = asyncio.run(_measure(numbers))
    print(json.dumps(found, indent=2, ensure_ascii=False) if arguments.json else _tables(found))


async def _measure(numbers: list[str]) -> dict[str, Any]:
    styles, slowest = await measure_styles(numbers)
    pairs = await measure_pairs()
    return {
        "references": len(numbers),
        "styles": sum(map(len, STYLES.values())),
        "by_class": {
            kind: {rule: dataclasses.asdict(one) for rule, one in both.items()} for kind, both in styles.items()
        },
        "choices": {"styles": len(CHOICES)} | dataclasses.asdict(measure_choices()),
        "slowest_seconds": slowest,
        "hard_seconds": measure_hard(),
        "pairs": {
            verdict: {kind: dataclasses.asdict(one) for kind, one in classes.items()}
            for verdict, classes in pairs.items()
        },
    }


def _tables(found: dict[str, Any]) -> str:
    lines = [
        f"{found['styles']} styles, {found['references']} references",
        "",
        "| class | rule | right | wrong | none | not right |",
        "|---|---|---|---|---|---|",
    ]
    for kind, both in found["by_class"].items():
        lines += [_row(f"{kind} | {rule}", one) for rule, one in both.items()]
    lines.append(_row("choices | letter", found["choices"]))
    hard = max(found["hard_seconds"].items(), key=lambda item: item[1])
    lines += [
        "",
        f"slowest extraction: {found['slowest_seconds'] * 1000:.1f} ms; of 64,000 characters of {hard[0]!r}: "
        f"{hard[1] * 1000:.1f} ms",
        "",
        "| pairs that must be | class | right | wrong | not right |",
        "|---|---|---|---|---|",
    ]
    for verdict, classes in found["pairs"].items():
        for kind, one in classes.items():
            lines.append(f"| {verdict} | {kind} | {one['right']} | {one['wrong']} | {_bad(one)} |")
    return "\n".join(lines)


def _row(name: str, one: dict[str, Any]) -> str:
    return f"| {name} | {one['right']} | {one['wrong']} | {one['none']} | {_bad(one)} |"


def _bad(one: dict[str, Any]) -> str:
    return "; ".join(repr(style).replace("|", "/") for style in one["bad"])


if __name__ == "__main__":
    main()
