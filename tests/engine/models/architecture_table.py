"""Write the table of architectures: ``python -m tests.engine.models.architecture_table FILE``, in half a minute.

For each architecture with small random weights: who computes it, and the largest error of its logits against float64
beside that of transformers in float32, both as parts of the largest logit. ``make test-long`` holds each to the bound
of float32; this shows by how much.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.models.decoder import Decoder
from engine.protocol.types import EngineError
from tests.engine.conftest import MODELS, SPARSE, save_random_model
from tests.engine.exact import exact_logits, exact_reference, peer_logits, reference
from tests.engine.helpers import Harness
from tests.engine.models.test_architectures import EXACT, REFUSED
from tests.engine.models.test_models import engine_logits, random_tokens
from tests.engine.models.test_sparse_attention import NEAR, find_smallest_gap

PROMPT = 41


class Row(NamedTuple):
    """An architecture: the errors, or why it is refused."""

    architecture: str
    kind: str
    computed_by: str
    ours: float = 0.0
    transformers: float = 0.0


def list_models() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the kind, the class and the options of each language model of the tests."""
    for kind, (architecture, options) in (MODELS | SPARSE).items():
        if architecture.endswith(("CausalLM", "HeadModel")):
            yield kind, architecture, options
    for architecture, options in EXACT.items():
        yield "", architecture, options


def measure(kind: str, architecture: str, options: dict[str, Any], folder: Path) -> Row:
    """Return the errors of a prompt and of what follows it, token by token."""
    save_random_model(architecture, {"initializer_range": 0.3} | options, folder)
    tokens = random_tokens(70, 1)
    if kind in SPARSE:
        texts = (random_tokens(70, number) for number in range(40))
        tokens = next(text for text in texts if find_smallest_gap(folder, text) > NEAR)
    harness = Harness(folder)
    ours = torch.cat((engine_logits(harness, tokens[:PROMPT]), engine_logits(harness, tokens, start=PROMPT)))
    exact = exact_logits(folder, tokens)
    largest = float(exact.abs().max())
    errors = (float((logits.double() - exact).abs().max()) / largest for logits in (ours, peer_logits(folder, tokens)))
    by = "our code" if isinstance(harness.core.model.decoder, Decoder) else "transformers' code over our cache"
    return Row(architecture, kind, by, *errors)


def render(rows: list[Row], refused: list[Row]) -> str:
    """Return the table in Markdown."""
    names = {row.architecture for row in rows}
    lines = [
        "# Architectures",
        "",
        "`python -m tests.engine.models.architecture_table benchmarks/results/architectures/table.md`",
        "",
        f"{len(names)} architectures are computed, in {len(rows)} variants, and {len(refused)} are refused. Small "
        "random models, a text of 70 tokens; the largest error of a logit against float64, as a part of the largest.",
        "",
        "| architecture | variant | computed by | error | of transformers in float32 |",
        "|---|---|---|---:|---:|",
    ]
    for row in sorted(rows):
        variant = f"`{row.kind}`" if row.kind else ""
        lines.append(
            f"| {row.architecture} | {variant} | {row.computed_by} | {row.ours:.1e} | {row.transformers:.1e} |"
        )
    lines += ["", "| refused | reason |", "|---|---|"]
    lines += [f"| {row.architecture} | {row.computed_by} |" for row in sorted(refused)]
    return "\n".join(lines) + "\n"


def main(out: Path) -> None:
    """Measure all models and write the table."""
    rows, refused = [], []
    for kind, architecture, options in list_models():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(kind, architecture, options, Path(folder)))
        exact_reference.cache_clear()
        reference.cache_clear()
        print(rows[-1], flush=True)
    for architecture, (options, _) in REFUSED.items():
        with tempfile.TemporaryDirectory() as folder:
            save_random_model(architecture, options, Path(folder))
            try:
                Harness(Path(folder))
            except EngineError as error:
                refused.append(Row(architecture, "", str(error).replace(folder, "MODEL")))
    out.write_text(render(rows, refused), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
