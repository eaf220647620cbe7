"""The bundled model in every format: size of the weights, quality loss, and speed."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.quantization.quality import compare, open_model
from benchmarks.quantization.texts import texts
from engine.core.local_engine import LocalEngine
from engine.protocol.request_checks import require_ids
from engine.protocol.types import Branch, Completion, GenerateRequest, SamplingParams, TokenizeRequest
from engine.quantization.options import create_options
from engine.quantization.quantize import quantize
from engine.text.tokenizer import Tokenizer
from reasoner.answers.extraction.extract import extract_answer
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import POLICY_SUITES, check_answer, load_problems

ORIGINAL = "float32"
VARIANTS: dict[str, tuple[str, int, int | None]] = {
    "int8": ("rtn", 8, None),
    "int4 rtn": ("rtn", 4, 128),
    "int4 gptq": ("gptq", 4, 128),
    "int4 awq": ("awq", 4, 128),
    "nf4": ("nf4", 4, None),
    "fp8": ("fp8", 8, None),
}
"""Method, bits and group size by row name."""
_MODEL = "policy"
_TOKENS = 200
_WARM_UP = 16
"""Problems that are solved before timing begins."""

_COLOURS = ("black", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_SHAPES = "os^vD*P"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the measured texts in tokens."""

    mean: float
    """Mean length of the texts for perplexity and divergence, the problem included."""
    longest: int
    solution: int = _TOKENS
    """Maximum length of a generated solution."""


Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the measurement."""

    calibration: int = 128
    """Number of training problems for calibration."""
    texts: int = 200
    """Number of held-out texts for perplexity and divergence."""
    problems: int = 300
    """Number of held-out problems of each suite for the accuracy."""
    rounds: int = 5
    """Number of timed rounds, in which the formats take turns. The fastest counts, since other load only adds time."""


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one format."""

    weights: str
    bytes: int
    """Size of all tensors as stored; 4 bytes for each weight of the original."""
    perplexity: float
    """Perplexity of solutions."""
    divergence: float
    """Kullback-Leibler divergence from the original, in nats per token."""
    accuracy: float
    """Share of the problems that greedy decoding solves."""
    tokens_per_second: float
    """Generated tokens per second of wall time, with all problems submitted at once."""


def measure(folder: Path, size: Size, progress: Progress) -> tuple[list[Row], Lengths]:
    """Quantize the model in ``folder`` in every format and measure it."""
    names = (ORIGINAL, *VARIANTS)
    total = len(names) + size.rounds
    original = open_model(folder)
    tokenizer = Tokenizer(folder, original.config.vocab_size)
    unseen = [(one.tokens, one.prompt) for one in texts(tokenizer, "heldout", size.texts)]
    problems = [problem for suite in POLICY_SUITES for problem in load_problems(suite, limit=size.problems)]
    folders, stored, quality = {ORIGINAL: folder}, {ORIGINAL: 4 * original.parameters}, {}
    with tempfile.TemporaryDirectory(prefix="reasoner-") as name:
        calibration = Path(name) / "calibration.jsonl"
        seen = texts(tokenizer, "train", size.calibration)
        calibration.write_text("".join(json.dumps({"text": one.text}) + "\n" for one in seen))
        for done, weights in enumerate(names):
            progress(done, total, weights)
            if weights != ORIGINAL:
                variant = folders[weights] = Path(name) / weights
                quantize(folder, variant, create_options(*VARIANTS[weights], calibration), lambda *_: None)
                index = json.loads((variant / "model.safetensors.index.json").read_text())
                stored[weights] = index["metadata"]["total_size"]
            quality[weights] = compare(original, open_model(folders[weights]), unseen)
        accuracy: dict[str, float] = {}
        speeds: dict[str, list[float]] = {weights: [] for weights in names}
        for turn in range(size.rounds):
            progress(len(names) + turn, total, f"speed, round {turn + 1} of {size.rounds}")
            for weights in names if turn % 2 else reversed(names):
                accuracy[weights], speed = asyncio.run(_solve(folders[weights], problems))
                speeds[weights].append(speed)
    progress(total, total, "done")
    sizes = [len(tokens) for tokens, _ in unseen]
    rows = [
        Row(
            weights,
            stored[weights],
            quality[weights].perplexity,
            quality[weights].divergence,
            accuracy[weights],
            max(speeds[weights]),
        )
        for weights in names
    ]
    return rows, Lengths(sum(sizes) / len(sizes), max(sizes))


def document(rows: Sequence[Row], size: Size, lengths: Lengths) -> dict[str, Any]:
    """Return the JSON document."""
    return {
        "model": _MODEL,
        "settings": asdict(size),
        "lengths": asdict(lengths),
        "rows": [asdict(row) for row in rows],
    }


def markdown(rows: Sequence[Row]) -> str:
    """Return the Markdown table."""
    lines = [
        "| weights | bytes | perplexity | divergence (nats) | accuracy | tokens/s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.weights} | {row.bytes:,} | {row.perplexity:.4f} | {row.divergence:.2g} | {row.accuracy:.3f} "
        f"| {row.tokens_per_second:,.0f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a PNG: divergence against bytes, and against speed. The line connects the Pareto front."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    panels: list[tuple[str, list[float], int]] = [
        ("megabytes of all weights", [row.bytes / 1e6 for row in rows], -1),
        ("generated tokens per second", [row.tokens_per_second for row in rows], 1),
    ]
    for plot, (label, values, sign) in zip(axes, panels, strict=True):
        best = pareto([(sign * value, row.divergence) for value, row in zip(values, rows, strict=True)])
        front = [sign * gain for gain, _ in best], [loss for _, loss in best]
        plot.plot(*front, "--", color="grey", zorder=2, label="nothing beats these")
        for value, row, colour, shape in zip(values, rows, _COLOURS, _SHAPES, strict=False):
            plot.scatter(value, row.divergence, s=70, color=colour, marker=shape, zorder=3, label=row.weights)
        plot.set_xlabel(label)
        plot.set_xlim(left=0)
        # The original's divergence is 0, which a logarithmic axis cannot show.
        plot.set_yscale("symlog", linthresh=1e-5)
        plot.set_ylim(-2e-6, 2 * max(row.divergence for row in rows))
        plot.grid(alpha=0.3)
    axes[0].set_ylabel("divergence from float32, nats a token")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(rows) + 1, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto front of (gain, loss) pairs, in ascending order of gain."""
    best: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda one: (-one[0], one[1])):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best[::-1]


async def _solve(folder: Path, problems: Sequence[Problem]) -> tuple[float, float]:
    """Return the accuracy and the generated tokens per second."""
    engine = LocalEngine({_MODEL: folder})
    try:
        await asyncio.gather(*(_one(engine, index, one) for index, one in enumerate(problems[:_WARM_UP])))
        await engine.clear_cache()
        start = time.perf_counter()
        solved = await asyncio.gather(*(_one(engine, index, one) for index, one in enumerate(problems)))
        seconds = time.perf_counter() - start
    finally:
        await engine.close()
    right, tokens = (sum(values) for values in zip(*solved, strict=True))
    return right / len(problems), tokens / seconds


async def _one(engine: LocalEngine, index: int, problem: Problem) -> tuple[bool, int]:
    prompt = await engine.tokenize(TokenizeRequest(_MODEL, [{"role": "user", "content": problem.text}]))
    greedy = SamplingParams(temperature=0.0)
    request = GenerateRequest(f"problem-{index}", _MODEL, prompt, (Branch(0, index, _TOKENS),), greedy)
    tokens: tuple[int, ...] = ()
    async for event in engine.generate(request):
        if isinstance(event, Completion):
            tokens = require_ids(event.token_ids)
    return check_answer(problem, extract_answer(engine.tokenizer(_MODEL).decode(tokens))), len(tokens)
