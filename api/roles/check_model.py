"""``reasoner engine --check``: compare a model with transformers. A process of its own computes."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from api.roles.compute_process import compute
from workers.config.types import require_model_folder

_NUMBER = ".2g"


def check_model(model: str) -> None:
    """Print how far a model's logits are from transformers'. Exit with status 1 if rounding is not the reason."""
    folder = require_model_folder(model.partition("=")[2] or model, "--check")
    document = compute("engine.core.check", {"model": str(folder)}, Console(stderr=True))
    console = Console()
    console.print(_build_table(document["texts"]))
    for line in _write_conclusions(document):
        console.print(line, highlight=False, soft_wrap=True)
    if not document["is_close"]:
        raise typer.Exit(1)


def _build_table(texts: list[dict[str, Any]]) -> Table:
    view = Table()
    columns = ("tokens", "difference", "of spread", "top-1", "perplexity", "transformers")
    for name in ("text", *columns):
        view.add_column(name, justify="left" if name == "text" else "right", no_wrap=True)
    for text in texts:
        perplexities = [text["perplexity"], text["reference_perplexity"]]
        view.add_row(
            text["name"],
            str(text["tokens"]),
            f"{text['difference']:{_NUMBER}}",
            f"{text['relative']:{_NUMBER}}",
            f"{text['top1_agreement']:.1%}",
            *("" if value is None else f"{value:.6g}" for value in perplexities),
        )
    return view


def _write_conclusions(document: dict[str, Any]) -> list[str]:
    layouts = document["layouts"]
    if layouts is None:
        layout, roundings = "transformers' code over the paged cache", "in float32"
    else:
        layout = ", ".join(f"{name} ({count} products)" for name, count in layouts.items())
        is_float32 = layouts.keys() == {"float32"}
        roundings = "in float32" if is_float32 else "with activations rounded to 8 bits, row by row"
    errors = [
        f"{rms:{_NUMBER}} (root mean square), {most:{_NUMBER}} (largest)" for rms, most in _collect_pairs(document)
    ]
    ratios = " and ".join(f"{ratio:g}" for ratio in document["accepted"])
    verdict = (
        f"as close as rounding allows ({ratios} times the expected errors)"
        if document["is_close"]
        else f"apart: rounding explains {ratios} times the expected errors at most"
    )
    return [
        "difference: the largest of any logit; of spread: as a share of the logits' standard deviation",
        f"{document['architecture']}: {layout}",
        f"errors against float64: {errors[0]}",
        f"expected, of transformers {roundings}: {errors[1]}",
        verdict,
    ]


def _collect_pairs(document: dict[str, Any]) -> list[list[float]]:
    return [document["error"], document["expected"]]
