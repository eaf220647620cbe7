"""Options of ``reasoner jobs list`` that choose jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from api.cli.options import parse_time


@dataclass(frozen=True, slots=True)
class JobFilters:
    """The jobs of a list. All conditions that are given hold."""

    status: Annotated[str | None, typer.Option(help="Only jobs with this status.")] = None
    strategy: Annotated[str | None, typer.Option(help="Only jobs of this strategy.")] = None
    model: Annotated[str | None, typer.Option(help="Only jobs of this model.")] = None
    name: Annotated[str | None, typer.Option(help="Only jobs that gave this name as their model.")] = None
    owner: Annotated[str | None, typer.Option(help="Only jobs of this owner, for keys that see all.")] = None
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only jobs with this metadata. May be repeated.")
    ] = None
    created_after: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Submitted since then: 2d, 12h, 2026-01-31, or seconds since 1970."),
    ] = None
    created_before: Annotated[str | None, typer.Option(metavar="TIME", help="Submitted before then.")] = None
    search: Annotated[str | None, typer.Option(metavar="TEXT", help="Only problems with all of these words.")] = None

    def build_query(self) -> dict[str, Any]:
        """Return the arguments of ``Client.list``. Raises ``typer.BadParameter``."""
        times = {"created_after": self.created_after, "created_before": self.created_before}
        names = ("status", "strategy", "model", "name", "owner")
        return {
            **{name: getattr(self, name) for name in names},
            **{
                name: None if text is None else parse_time(text, f"--{name.replace('_', '-')}")
                for name, text in times.items()
            },
            "q": self.search,
            "metadata": dict(map(_split_pair, self.metadata or [])),
        }


def _split_pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign:
        raise typer.BadParameter(f"{text!r} is no pair: write KEY=VALUE", param_hint="--metadata")
    return key, value
