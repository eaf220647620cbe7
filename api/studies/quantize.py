"""``reasoner quantize``: write a model in fewer bits. A process of its own computes, since this one has no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from api.cli.console import print_json
from api.roles.compute_process import compute
from workers.config.types import require_model_folder


def quantize(
    model: Annotated[str | None, typer.Argument(help="A bundled model, or the folder of a checkpoint.")] = None,
    out: Annotated[Path | None, typer.Argument(help="Folder to write; it must not exist yet.")] = None,
    method: Annotated[str, typer.Option(help="rtn (round to nearest), gptq, awq, fp8 or nf4.")] = "rtn",
    bits: Annotated[int | None, typer.Option(help="8 or 4; default: rtn and fp8 8, gptq, awq and nf4 4.")] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Columns that share a scale; -1: whole rows. Default: 128; rtn in 8 bits: W8A8.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help='For gptq and awq: a text, or .jsonl with a "text" on each line.')
    ] = None,
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Measure each method on the bundled model instead; the folder for results is optional."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --report: print one JSON document on stdout.")] = False,
) -> None:
    """Write a checkpoint in fewer bits, in a public format that other engines can read."""
    console = Console(stderr=True)
    if report:
        if model is not None and out is not None:
            raise typer.BadParameter("--report takes one argument, the folder for its results, and no model")
        _report(None if model is None else Path(model), as_json, console)
        return
    if model is None or out is None:
        raise typer.BadParameter("give MODEL, a bundled model or the folder of a checkpoint, and OUT, a new folder")
    if as_json:
        raise typer.BadParameter("--json needs --report")
    folder = require_model_folder(model, "MODEL")
    request = {"model": str(folder), "out": str(out), "method": method, "bits": bits, "group_size": group_size}
    request["calibration"] = None if calibration is None else str(calibration)
    compute("engine.quantization", request, console)
    console.print(f"wrote {out}: {_describe_sizes(folder, out)}", markup=False, highlight=False, soft_wrap=True)


def _describe_sizes(before: Path, after: Path) -> str:
    """Return the size of the weights and the bits of one, on average over all, of two checkpoints."""
    old, new = (sum(path.stat().st_size for path in folder.glob("*.safetensors")) for folder in (before, after))
    weights = _count_weights(before)
    return (
        f"{new / 1e6:,.1f} MB instead of {old / 1e6:,.1f} MB, "
        f"{8 * new / weights:.1f} bits a weight instead of {8 * old / weights:.1f}"
    )


def _count_weights(folder: Path) -> int:
    from safetensors import safe_open

    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return count


def _report(out: Path | None, as_json: bool, console: Console) -> None:
    document = compute("benchmarks.quantization", {"out": None if out is None else str(out)}, console)
    if as_json:
        print_json(document)
        return
    view = Table()
    for name in ("weights", "bytes", "perplexity", "divergence (nats)", "accuracy", "tokens/s"):
        view.add_column(name, justify="left" if name == "weights" else "right", no_wrap=True)
    for row in document["rows"]:
        view.add_row(
            row["weights"],
            f"{row['bytes']:,}",
            f"{row['perplexity']:.4f}",
            f"{row['divergence']:.2g}",
            f"{row['accuracy']:.3f}",
            f"{row['tokens_per_second']:,.0f}",
        )
    out_console = Console()
    out_console.print(view)
    size, lengths = document["settings"], document["lengths"]
    out_console.print(
        f"perplexity and divergence: {size['texts']} texts of {lengths['mean']:.0f} tokens on average and "
        f"{lengths['longest']} at most; accuracy and speed: {size['problems']} problems of each suite, solutions of "
        f"at most {lengths['solution']} tokens",
        highlight=False,
    )
