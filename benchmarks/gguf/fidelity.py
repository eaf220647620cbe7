"""``python -m benchmarks.gguf.fidelity --model FILE.gguf``: what the engine computes of a GGUF file beside transformers
and llama.cpp.

Greedy texts, at which token they first leave transformers' likeliest one, and by how much; and the perplexity of a
text. The engine runs the file as it is, with activations rounded to 8 bits, and a copy with float32 weights: a mistake
of the engine would show in both, one of the block kernels in the first alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.systems.ours import load as load_engine

# isort: split
import gguf
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.engine.workloads import Request
from benchmarks.quantization.quality import compute_text_logits, open_model
from engine.gguf.folder import WEIGHTS, open_gguf_folder
from engine.models.config import read_raw_config
from engine.text.tokenizer import Tokenizer

SUBJECTS = ("rain", "trains", "numbers", "the sea", "bread", "history", "chess", "winter", "cats", "music")
FORMS = ("Write about {}.", "The best thing about {} is", "1. {}\n2.", "Question: what is {}?\nAnswer:", "{} and")
PROMPTS = tuple(form.format(subject) for form in FORMS for subject in SUBJECTS)
GROUP, LEVELS = 32, 127
"""Columns that share a unit of rounded activations, and their largest code."""
WINDOW = 512
"""Tokens of each part of the text for the perplexity."""
BLOCKS, FLOAT32 = "the file", "its weights in float32"
TRANSFORMERS, LLAMA_CPP = "transformers, float32", "llama.cpp, the file"
TEXT = Path(__file__).parents[2] / "docs" / "explanation"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of a greedy text that is not transformers' likeliest."""

    form: str
    prompt: str
    token: int
    """Its place in the text, from 0."""
    margin: float
    """Transformers' logit of its likeliest token, less that of ours."""
    rounding: float
    """Largest change of a logit there when transformers rounds activations as the block kernels do."""

    @property
    def is_tie(self) -> bool:
        """Return True if the rounding alone may exchange both tokens."""
        return self.margin <= self.rounding


class RoundedGroups(TorchFunctionMode):
    """Rounds the inputs of products to 8 bits in groups of columns, as the block kernels do."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            groups = args[0].unflatten(-1, (-1, GROUP))
            step = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / LEVELS
            args = ((groups / step).round().mul(step).flatten(-2), *args[1:])
        return function(*args, **(kwargs or {}))


def write_float32(file: Path, to: Path) -> None:
    """Write a GGUF file again, with every tensor dequantised by the package ``gguf``."""
    reader = GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(to, architecture)
    for name, value in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            of_items = value.types[-1] if value.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, value.contents(), value.types[0], sub_type=of_items)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def open_float32(file: Path, scratch: Path) -> Path:
    """Return a model folder, made in ``scratch``, with the weights of a GGUF file in float32."""
    write_float32(file, scratch / "float32.gguf")
    folder = scratch / "folder"
    shutil.copytree(open_gguf_folder(file), folder)
    (folder / WEIGHTS).write_text(json.dumps([str(scratch / "float32.gguf")]))
    return folder


def open_transformers(file: Path) -> Any:
    """Return transformers' reading of a GGUF file, in float32."""
    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def find_difference(form: str, prompt: str, tokens: Sequence[int], exact: Tensor, rounded: Tensor) -> Difference | None:
    """Compare a greedy text with the logits ``[tokens, vocab]`` of transformers for it."""
    wrong = (exact.argmax(-1) != torch.tensor(tokens)).nonzero()
    if not len(wrong):
        return None
    at = int(wrong[0])
    margin = float(exact[at].max() - exact[at, tokens[at]])
    return Difference(form, prompt, at, margin, float((rounded[at] - exact[at]).abs().max()))


@torch.inference_mode()
def compare_texts(
    folders: dict[str, Path], theirs: Any, tokenizer: Tokenizer, length: int, prompts: Sequence[str] = PROMPTS
) -> dict[str, list[Difference]]:
    """Return the differences of the greedy texts by form."""
    requests = [Request(tokenizer.encode_prompt(prompt), 1, length) for prompt in prompts]
    found: dict[str, list[Difference]] = {}
    for form, folder in folders.items():
        with load_engine(folder, torch.get_num_threads()).session(seed=0, greedy=True) as generate:
            outputs = [sample for (sample,) in generate(requests)]
        found[form] = []
        for prompt, request, tokens in zip(prompts, requests, outputs, strict=True):
            text, places = torch.tensor([[*request.prompt, *tokens]]), slice(len(request.prompt) - 1, -1)
            exact = theirs(text).logits[0, places]
            with RoundedGroups():
                rounded = theirs(text).logits[0, places]
            difference = find_difference(form, prompt, tokens, exact, rounded)
            found[form] += [] if difference is None else [difference]
        _say(f"{form}: {len(found[form])} of {len(prompts)} texts differ from transformers'")
    return found


@torch.inference_mode()
def compute_perplexities(
    folders: dict[str, Path], theirs: Any, windows: list[list[int]], file: Path, peer_python: str
) -> dict[str, float]:
    """Return the perplexity of the windows by system."""
    losses = {}
    for form, folder in folders.items():
        model = open_model(folder)
        losses[form] = _mean_loss(windows, (compute_text_logits(model, window) for window in windows))
    losses[TRANSFORMERS] = _mean_loss(windows, (theirs(torch.tensor([window])).logits[0] for window in windows))
    asked = {"model": str(file), "texts": windows, "threads": torch.get_num_threads()}
    done = subprocess.run(
        [peer_python, "-m", "benchmarks.gguf.llama_loss"], input=json.dumps(asked), capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"llama.cpp did not compute the text: {done.stderr.strip().splitlines()[-1]}")
    losses[LLAMA_CPP] = json.loads(done.stdout)["loss"]
    return {system: math.exp(loss) for system, loss in losses.items()}


def _mean_loss(windows: list[list[int]], logits: Iterable[Tensor]) -> float:
    parts = [
        float(F.cross_entropy(rows[:-1], torch.tensor(one[1:]))) for one, rows in zip(windows, logits, strict=True)
    ]
    return sum(parts) / len(parts)


def cut_windows(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    """Return the text's whole windows, each of which begins with the token that begins a text, if there is one."""
    tokens = list(tokenizer.encode(text))
    begin = list(tokenizer.encode_prompt(""))[:1]
    size = WINDOW - len(begin)
    return [begin + tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]


def measure(file: Path, text: str, length: int, peer_python: str) -> dict[str, Any]:
    """Return the document of results."""
    folder = open_gguf_folder(file)
    tokenizer = Tokenizer(folder, int(read_raw_config(folder).fields["vocab_size"]))
    windows = cut_windows(tokenizer, text)
    if not windows:
        sys.exit(f"the text is shorter than {WINDOW} tokens")
    with tempfile.TemporaryDirectory(prefix="reasoner-fidelity-") as name:
        _say("writing the weights in float32")
        folders = {BLOCKS: folder, FLOAT32: open_float32(file, Path(name))}
        theirs = open_transformers(file)
        differences = compare_texts(folders, theirs, tokenizer, length)
        perplexities = compute_perplexities(folders, theirs, windows, file, peer_python)
    return {
        "model": file.name,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "texts": len(PROMPTS),
        "length": length,
        "differences": {
            form: [asdict(one) | {"is_tie": one.is_tie} for one in of_form] for form, of_form in differences.items()
        },
        "perplexity": perplexities,
        "text": {"sha256": hashlib.sha256(text.encode()).hexdigest(), "windows": len(windows), "window": WINDOW},
    }


def markdown(results: dict[str, Any], command: str) -> str:
    """Return the tables of ``table.md``."""
    lines = [f"Made by `{command}` on {results['machine']}. Model: `{results['model']}`.", ""]
    lines += [
        f"{results['texts']} greedy texts of {results['length']} tokens, compared with transformers in float32 on the "
        "weights that the package `gguf` dequantises. Margin: transformers' logit of its likeliest token less that of "
        "ours, at the first token that differs. A tie: no more than rounding activations to 8 bits changes a logit of "
        "transformers there.",
        "",
        "| engine with | differ | of these ties | first token that differs, least | largest margin |",
        "|---|---:|---:|---:|---:|",
    ]
    for form, found in results["differences"].items():
        first, margin = (
            min((one["token"] for one in found), default=None),
            max((one["margin"] for one in found), default=0),
        )
        ties = sum(one["is_tie"] for one in found)
        lines.append(f"| {form} | {len(found)} | {ties} | {'' if first is None else first} | {margin:.2g} |")
    text, peer = results["text"], results["perplexity"][LLAMA_CPP]
    lines += [
        "",
        f"Perplexity of {text['windows']} windows of {text['window']} tokens (text's SHA-256 {text['sha256'][:16]}), "
        "the same tokens for each; keys and values in float32.",
        "",
        "| system | perplexity | relative to llama.cpp |",
        "|---|---:|---:|",
    ]
    for system, value in results["perplexity"].items():
        name = f"engine, {system}" if system in (BLOCKS, FLOAT32) else system
        lines.append(f"| {name} | {value:.4f} | {(value / peer - 1) * 100:+.3f} % |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, and write results.json and table.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf.fidelity", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--out", type=Path, help="folder for results.json and table.md")
    parser.add_argument("--text", type=Path, help="text for the perplexity; default: the pages of docs/explanation")
    parser.add_argument("--length", type=int, default=100, help="tokens of a greedy text (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="for every system (%(default)s)")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pages = [arguments.text] if arguments.text else sorted(TEXT.glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    results = measure(arguments.model.absolute(), text, arguments.length, arguments.peer_python)
    table = markdown(results, shlex.join(["python", "-m", "benchmarks.gguf.fidelity", "--model", arguments.model.name]))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        (arguments.out / "table.md").write_text(table)
    print(table)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
