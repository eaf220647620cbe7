"""``python -m engine.core.check``: compare a model's logits with those of transformers (``reasoner engine --check``).

Its argument is a JSON object with ``model``, the folder of a checkpoint. It writes JSON lines: ``{"done", "total",
"next"}`` for each part, then ``{"result"}``, or ``{"error"}`` with ``"usage": true`` and exit status 1.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.threads import short_waits  # noqa: F401 - must be imported before torch

# isort: split
import torch
from torch import Tensor

from engine.core.engine_core import EngineCore
from engine.core.reference import Reference
from engine.models.config import read_raw_config
from engine.models.decoder import Decoder
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError, ScoreItem, ScoreRequest, ScoreResult
from engine.scheduler.sequence import Event, Request
from engine.threads.processors import choose_threads

TEXTS = {
    "prose": "The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote down which ships passed.",
    "math": "A train travels 60 km in 45 minutes. Its speed is 60 / 0.75 = 80 km/h, so 200 km take 2.5 hours.",
    "code": "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return total",
    "mixed": "Guten Morgen! ¿Cómo estás? Il fait très froid aujourd'hui. 今天天气很好。 Сегодня хорошая погода.",
}
FLOAT32, ROUNDED = (8.0, 8.0), (2.0, 4.0)
"""Largest accepted ratios of our error to that of transformers, for the root mean square and the largest one.

In float32: the error of a sum of n products grows with sqrt(n) in one chain, as here, and with sqrt(2 sqrt(n)) in the
best blocks, as in transformers; their quotient is 8 for n = 16384. With rounded activations: both have the same
roundings, or we have finer ones, so either may be closer by chance. A mistake is far larger.
"""


_FLOATS = {"float32", "float16", "bfloat16"}
"""Layouts that round no activations."""


@dataclass(frozen=True, slots=True)
class TextResult:
    """One text's comparison."""

    name: str
    tokens: int
    difference: float
    """Largest absolute difference of logits."""
    relative: float
    """The same, as a share of the logits' spread (their standard deviation at a position)."""
    top1_agreement: float
    """Share of positions with the same most likely token."""
    perplexity: float | None
    reference_perplexity: float | None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The comparison of a model with transformers."""

    architecture: str
    layouts: dict[str, int] | None
    """Number of products in each layout; ``None`` for a model that transformers' code computes."""
    texts: list[TextResult]
    error: tuple[float, float]
    """Root mean square and largest error of our logits against float64."""
    expected: tuple[float, float]
    """The same errors of transformers with the roundings of the layouts."""
    accepted: tuple[float, float]
    """Largest accepted ratios of ``error`` to ``expected``."""
    is_close: bool


def check_model(folder: Path, report_progress: Callable[[int, int, str], None]) -> CheckResult:
    """Compare a model with transformers on a few texts, on the CPU. Raises ``EngineError`` if it cannot be loaded."""
    report_progress(0, 3, "this engine")
    core = EngineCore("model", folder, EngineOptions(kv_tokens=1024, max_running=4, device="cpu"))
    texts = {name: core.model.tokenizer.encode_prompt(text) for name, text in TEXTS.items()}
    texts = {name: tokens[: core.model.info.context] for name, tokens in texts.items() if len(tokens) > 1}
    if not texts:
        raise EngineError(f"{folder}: its tokenizer splits no text into two tokens")
    ours = [_compute_logits(core, tokens) for tokens in texts.values()]
    info, layouts = core.model.info, core.model.decoder.layouts if isinstance(core.model.decoder, Decoder) else None
    del core  # its weights
    report_progress(1, 3, "transformers in float32")
    reference = Reference(read_raw_config(folder), info.context)
    rounds_activations = layouts is not None and not layouts.keys() <= _FLOATS
    theirs, peer = reference.compute_float32(list(texts.values()), rounds_activations=rounds_activations)
    report_progress(2, 3, "transformers in float64")
    exact = reference.compute_float64(list(texts.values()))
    report_progress(3, 3, "done")
    error, expected = _measure_errors(ours, exact), _measure_errors(peer, exact)
    accepted = ROUNDED if rounds_activations else FLOAT32
    is_language_model = info.kind == "generate"
    return CheckResult(
        architecture=info.architecture,
        layouts=layouts,
        texts=[
            _compare(name, tokens, *logits, is_language_model=is_language_model)
            for (name, tokens), *logits in zip(texts.items(), ours, theirs, strict=True)
        ],
        error=error,
        expected=expected,
        accepted=accepted,
        is_close=all(one <= ratio * other for one, ratio, other in zip(error, accepted, expected, strict=True)),
    )


def _compute_logits(core: EngineCore, tokens: Sequence[int]) -> Tensor:
    """Return the logits ``[tokens, vocab]``: of the first half in one step, then token by token over the cache."""
    half = len(tokens) // 2
    rows = _score(core, [(token,) for token in tokens[:half]], range(half))
    for end in range(half + 1, len(tokens) + 1):
        rows += _score(core, [tuple(tokens[:end])], range(1))
    return torch.tensor(rows)


def _score(core: EngineCore, parts: list[tuple[int, ...]], read: Sequence[int]) -> list[Any]:
    info, events = core.model.info, list[Event]()
    token_ids = () if info.kind == "classify" else tuple(range(info.vocab_size))
    request = ScoreRequest("check", info.id, (ScoreItem(tuple(parts), tuple(read)),), token_ids)
    in_flight = Request(
        "check", events.append, deadline=math.inf, stream=False, priority=0, namespace=None, pin_key=None
    )
    core.model.add_items(request, in_flight)
    core.submit(in_flight)
    while core.has_work:
        core.step()
    [result] = events
    if not isinstance(result, ScoreResult) or result.values is None:
        raise EngineError(f"the engine failed: {result}")
    return list(result.values)


def _measure_errors(logits: list[Tensor], exact: list[Tensor]) -> tuple[float, float]:
    """Return the root mean square and the largest error of all texts."""
    differences = torch.cat([one.double() - other for one, other in zip(logits, exact, strict=True)])
    # An exact result has the rounding of its last place at least.
    last = torch.finfo(torch.float32).eps / 2 * torch.cat(exact).abs()
    size = torch.maximum(differences.abs(), last)
    return float(size.square().mean().sqrt()), float(size.max())


def _compare(name: str, tokens: Sequence[int], ours: Tensor, theirs: Tensor, *, is_language_model: bool) -> TextResult:
    difference = float((ours - theirs).abs().max())
    return TextResult(
        name=name,
        tokens=len(tokens),
        difference=difference,
        relative=difference / float(theirs.std(-1).mean()),
        top1_agreement=float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
        perplexity=_compute_perplexity(ours, tokens) if is_language_model else None,
        reference_perplexity=_compute_perplexity(theirs, tokens) if is_language_model else None,
    )


def _compute_perplexity(logits: Tensor, tokens: Sequence[int]) -> float:
    logprobs = logits[:-1].double().log_softmax(-1)
    return math.exp(-float(logprobs[range(len(tokens) - 1), list(tokens[1:])].mean()))


def main() -> int:
    torch.set_num_threads(choose_threads().number)
    try:
        result = check_model(Path(json.loads(sys.argv[1])["model"]), _report_progress)
    except EngineError as error:
        print(json.dumps({"error": str(error), "usage": True}), flush=True)
        return 1
    print(json.dumps({"result": asdict(result)}), flush=True)
    return 0


def _report_progress(done: int, total: int, next_part: str) -> None:
    print(json.dumps({"done": done, "total": total, "next": next_part}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
