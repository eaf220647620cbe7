"""Write the table of GGUF files beside llama.cpp: ``python -m tests.engine.gguf.beside_llama_cpp FOLDER``.

Small random models of this year's architectures are written as GGUF files, with each of some kinds of weights. Our
engine and llama.cpp's server compute the same text and continue the same prompt. What is right is what transformers
computes in float64: of the checkpoint for files in float32, else of the file's dequantised weights.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from api.roles.supervisor import free_port
from engine.core.reference import Reference
from engine.gguf.folder import open_gguf_folder
from engine.models.config import read_raw_config
from engine.protocol.types import Branch
from tests.chaos.processes import until
from tests.engine.conftest import save_random_model
from tests.engine.exact import exact_logits
from tests.engine.gguf.files import write_gguf
from tests.engine.gguf.test_models import CASES, WIDE
from tests.engine.helpers import Harness, generate
from tests.engine.models.test_models import engine_logits
from tests.engine.quantization.test_mxfp4 import write_models as write_mxfp4

NEW = (
    *("smollm3", "olmo3", "ministral3", "granite", "gpt-oss", "lfm2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    *("qwen3next", "qwen35", "qwen35moe", "gemma4", "gemma4, shared keys", "gemma4, experts"),
    *("granitehybrid", "granitehybrid, dense", "nemotron_h", "nemotron_h_moe", "falcon-h1", "mamba2"),
)
DIFFERING = {
    "gpt-oss": "it rounds the bounds of YaRN to whole dimensions, which the checkpoint's config forbids (`truncate`)",
    "deepseek_v2": "it chooses groups of experts by their two best, as DeepSeek-V3 does, and not by their best one",
    **dict.fromkeys(
        ("gemma4", "gemma4, shared keys", "gemma4, experts"), "it reads GELU from a table of 16-bit floats"
    ),
}
"""Why llama.cpp differs from float64 by more than rounding explains, by case; each was seen by changing just that."""
_DELTA = {"linear_num_key_heads": 2, "linear_value_head_dim": 16}
_CAP = {"final_logit_softcapping": 30.0}  # which llama.cpp assumes where a file has none
CHANGED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"q_lora_rank": 32},
    **{"qwen3next": _DELTA, "qwen35": _DELTA, "qwen35moe": _DELTA},
    "granitehybrid, dense": {"mamba_proj_bias": False, "mamba_conv_bias": True},
    **{"gemma4": _CAP, "gemma4, experts": _CAP},
}
"""Options of models that have only what llama.cpp has of these architectures."""
WIDER = {
    **{"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 4},
    "initializer_range": 0.09,
}
"""Options of models in Q4_K, whose blocks have 256 columns."""
WIDE_CASES: dict[str, dict[str, Any]] = {
    **{"gemma4": {}, "nemotron_h": {}, "qwen35": {}, "lfm2": {}},
    "granitehybrid": {"mamba_n_heads": 32},
}
KINDS = (Kind.F32, Kind.F16, Kind.Q8_0)
TEXT = Path(__file__).parents[3] / "docs" / "explanation" / "engine.md"
LENGTH, PROMPT, CONTINUED = 160, 24, 64
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """A file: perplexities, largest errors of a log-probability, and the tokens that both texts begin with."""

    case: str
    kind: str
    refusal: str = ""
    exact: float = 0.0
    ours: float = 0.0
    theirs: float = 0.0
    our_error: float = 0.0
    their_error: float = 0.0
    same_tokens: int = 0
    margin: float = 0.0
    """Difference in float64 of the log-probabilities of the two tokens where the texts part."""

    @property
    def is_tie(self) -> bool:
        """Return True if the errors alone may exchange the two tokens."""
        return self.margin <= 2 * (self.our_error + self.their_error)


class LlamaCpp:
    """llama.cpp's server with one file."""

    def __init__(self, client: httpx.Client, vocab: int, letter: int) -> None:
        """``letter``: a token that is a whole character: the server tells no probabilities where it samples a part."""
        self._client, self._vocab, self._letter = client, vocab, letter

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """Return the log-probabilities ``[vocab]`` of the token after ``tokens``."""
        asked = {"prompt": list(tokens), "n_predict": 1, "n_probs": self._vocab, "temperature": 0.0}
        sampled = {"logit_bias": [[self._letter, 1e4]]}  # which changes none of the probabilities that it tells
        answer = self._client.post("/completion", json=asked | sampled | {"cache_prompt": True})
        answer.raise_for_status()
        found = torch.full((self._vocab,), -torch.inf, dtype=torch.float64)
        for one in answer.json()["completion_probabilities"][0]["top_logprobs"]:
            found[one["id"]] = one["logprob"]
        return found


@contextmanager
def serve(server: Sequence[str], file: Path, vocab: int, letter: int) -> Iterator[LlamaCpp]:
    """Serve a file. ``server``: the command. Raises ``RuntimeError`` with the reason if the server refuses it."""
    port, log = free_port(), file.with_suffix(".log")
    size = ("-c", "512", "-np", "1", "-t", "1", "-fa", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
    command = [*server, "-m", str(file), *size, "--host", "127.0.0.1", "--port", str(port), "--no-webui"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: process.poll() is not None or _answers(url), "llama.cpp answers", _START_SECONDS)
        if process.poll() is not None:
            raise RuntimeError(find_reason(log.read_text(errors="replace")))
        with httpx.Client(base_url=url, timeout=120) as client:
            yield LlamaCpp(client, vocab, letter)
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


def find_reason(log: str) -> str:
    """Return the first line of a log that names an error, without what is before it."""
    lines = [line for line in log.splitlines() if "error" in line.lower() or "GGML_ASSERT" in line]
    return (lines or log.splitlines() or ["it ended"])[0].split("error loading model: ")[-1][-200:]


def measure(server: Sequence[str], case: str, kind: Kind, folder: Path) -> Row:
    """Write the file of a case and compare what both compute of it."""
    checkpoint, file = folder / "checkpoint", folder / "model.gguf"
    if kind == Kind.MXFP4:
        checkpoint, exact_folder = write_mxfp4(folder, 0)
        write_gguf(checkpoint, file, "gpt-oss")
    else:
        architecture, class_name, options = CASES[case]
        chosen = {"initializer_range": 0.15} | WIDE | options | CHANGED.get(case, {})
        if kind == Kind.Q4_K:
            chosen |= WIDER | WIDE_CASES[case]
        save_random_model(class_name, chosen, checkpoint)
        write_gguf(checkpoint, file, architecture, kind)
        exact_folder = checkpoint if kind == Kind.F32 else None
    opened = open_gguf_folder(file)
    harness = Harness(opened)
    tokenizer, vocab = harness.core.model.tokenizer, harness.core.model.info.vocab_size
    tokens = tuple(tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:LENGTH])
    written = list(tokens[:PROMPT])
    request = generate(written, [Branch(1, 1, CONTINUED)], temperature=0.0, ignore_eos=True)
    (completion,) = harness.complete(request)
    ours = engine_logits(harness, tokens).double().log_softmax(-1)
    try:
        with serve(server, file, vocab, tokenizer.encode("a")[0]) as peer:
            theirs = torch.stack([peer.logprobs(tokens[: end + 1]) for end in range(len(tokens))])
            for _ in range(CONTINUED):
                written.append(int(peer.logprobs(written).argmax()))
    except RuntimeError as error:
        return Row(case, kind.name, str(error))
    texts = (tokens, (*tokens[:PROMPT], *completion.token_ids))
    exact, continued = compute_exact(opened, exact_folder, texts)
    same, margin = compare_texts(completion.token_ids, written[PROMPT:], continued[PROMPT - 1 :])
    perplexities = [compute_perplexity(one, tokens) for one in (exact, ours, theirs)]
    errors = [float((one - exact).abs().max()) for one in (ours, theirs)]
    return Row(case, kind.name, "", *perplexities, *errors, same, margin)


def compute_exact(opened: Path, checkpoint: Path | None, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the log-probabilities ``[tokens, vocab]`` of texts in float64."""
    if checkpoint is not None:
        return [exact_logits(checkpoint, text).log_softmax(-1) for text in texts]
    found = Reference(read_raw_config(opened), 512).compute_float64(list(texts))
    return [logits.log_softmax(-1) for logits in found]


def compare_texts(ours: Sequence[int], theirs: Sequence[int], exact: Tensor) -> tuple[int, float]:
    """Return how many tokens two texts begin with, and how far apart the next ones are in float64."""
    parted = next((place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
    if parted is None:
        return len(ours), 0.0
    return parted, float((exact[parted, ours[parted]] - exact[parted, theirs[parted]]).abs())


def compute_perplexity(logprobs: Tensor, tokens: Sequence[int]) -> float:
    """Return the perplexity of a text from the log-probabilities ``[tokens, vocab]`` after each of its tokens."""
    return float((-logprobs[range(len(tokens) - 1), list(tokens[1:])].mean()).exp())


def render(rows: Sequence[Row]) -> str:
    """Return the table in Markdown."""
    lines = [
        "`python -m tests.engine.gguf.beside_llama_cpp benchmarks/results/gguf-architectures`",
        "",
        f"Small random models. The perplexity of a text of {LENGTH} tokens and the largest error of a log-probability "
        f"in it, against transformers in float64; and how many of {CONTINUED} greedy tokens after {PROMPT} others are "
        "the same, up to where the texts part: at a tie the errors alone may exchange the two tokens.",
        "",
        "| architecture | weights | float64 | ours | llama.cpp | error | of llama.cpp | same tokens |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        begin = f"| {row.case} | {row.kind} "
        if row.refusal:
            lines.append(f"{begin}| | | refused: {row.refusal} | | | |")
            continue
        is_tie = row.is_tie and row.case not in DIFFERING
        end = "" if row.same_tokens == CONTINUED else ", tie" if is_tie else f", margin {row.margin:.2g}"
        figures = f"{row.exact:.3f} | {row.ours:.3f} | {row.theirs:.3f} | {row.our_error:.1e} | {row.their_error:.1e}"
        lines.append(f"{begin}| {figures} | {row.same_tokens}{end} |")
    lines += [
        "",
        "llama.cpp rounds activations to 16 bits where weights have 16, and both round them to 8 bits before products "
        "with blocks, which may send tokens to other experts. In float32 llama.cpp differs by more than rounding "
        "explains from three models:",
        "",
    ]
    reasons = {reason: [case for case, one in DIFFERING.items() if one == reason] for reason in DIFFERING.values()}
    lines += [f"* {', '.join(cases)}: {reason}" for reason, cases in reasons.items()]
    return "\n".join([*lines, ""])


def list_files(cases: Sequence[str]) -> Iterator[tuple[str, Kind]]:
    """Yield the cases and the kinds of their weights."""
    for case in cases:
        yield from ((case, kind) for kind in KINDS)
        if case in WIDE_CASES:
            yield case, Kind.Q4_K
        if case == "gpt-oss":
            yield case, Kind.MXFP4


def main() -> None:
    """Measure, and write results.json and table.md."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.gguf.beside_llama_cpp", description=__doc__)
    parser.add_argument("out", type=Path, help="folder for results.json and table.md")
    parser.add_argument("--server", default="llama-server", help="command of llama.cpp's server (%(default)s)")
    parser.add_argument("--cases", default="|".join(NEW), help="architectures, separated by bars")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for case, kind in list_files(arguments.cases.split("|")):
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(measure(shlex.split(arguments.server), case, kind, Path(scratch)))
        print(rows[-1], file=sys.stderr, flush=True)
        (arguments.out / "results.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
        (arguments.out / "table.md").write_text(render(rows))


if __name__ == "__main__":
    main()
