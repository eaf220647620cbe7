"""Time searches on one GPU: best-of-N and a tree, without scores, with those of a PRM, and with grades.

``python -m benchmarks.gpu.search --out FILE [--peer-python PYTHON]`` on a GPU; with ``--tiny`` anywhere, as a test of
itself. Policy and PRM have the shapes of Llama 3.1 8B and random weights, in one engine. With ``--peer-python``,
an interpreter that can import vLLM, that runs the same searches first, those with a PRM left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import torch

from benchmarks.gpu import decode
from benchmarks.gpu.search_work import (
    GRADES,
    QUESTION,
    SEPARATOR,
    WARM_TOKENS,
    Beam,
    Search,
    Seen,
    choose,
    list_searches,
    list_tiny_searches,
    make_prompt,
)
from benchmarks.kernels import step as shapes
from benchmarks.kernels.dry_run import TINY_MODEL
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.request_checks import require_ids
from engine.protocol.types import Branch, Completion, GenerateRequest, SamplingParams, ScoreItem, ScoreRequest

POLICY, PRM = "policy", "prm"
_SAMPLING = SamplingParams(temperature=1.0, ignore_eos=True)
_PEER_SECONDS = 420
Peers = Mapping[tuple[str, str], Seen]
"""What a peer took, by a search's name and scores."""


def main(argv: Sequence[str] | None = None) -> int:
    """Time all searches and write the table after each; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.search", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file of the table")
    peer = os.environ.get("REASONER_PEER_PYTHON")
    parser.add_argument("--peer-python", type=Path, default=peer, help="an interpreter that can import vLLM")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on whatever device there is")
    arguments = parser.parse_args(argv)
    searches = list_tiny_searches() if arguments.tiny else list_searches()
    sizes: decode.Sizes = TINY_MODEL if arguments.tiny else decode.SIZES
    rows: list[tuple[Search, Seen]] = []
    peers: Peers = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, architecture in ((POLICY, "LlamaForCausalLM"), (PRM, "LlamaForTokenClassification")):
            (folder / name).mkdir()
            decode.write_checkpoint(folder / name, {**sizes, "architectures": [architecture]})
        if arguments.peer_python is not None:  # before ours, whose memory is free then
            peers = run_peer(arguments.peer_python, folder / POLICY, searches)
        stack.enter_context(decode.random_weights(shapes.read_whole))
        if not torch.cuda.is_available():
            stack.enter_context(decode.emulated_gpu())
        kv_tokens = max(search.kept for search in searches)
        options = EngineOptions(kv_tokens=kv_tokens, step_tokens=256 if arguments.tiny else 8192)
        ours = Ours(LocalEngine({name: folder / name for name in (POLICY, PRM)}, options))
        for search in searches:
            rows.append((search, ours.run(search)))
            arguments.out.write_text(markdown(rows, peers), encoding="utf-8")
        ours.close()
    print(markdown(rows, peers))
    return 0


class Ours:
    """Searches on this repository's engine."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine, self._loop, self._requests = engine, asyncio.Runner(), 0

    def run(self, search: Search) -> Seen:
        """Run a search from a cold cache, after a short one of its kind for which kernels are compiled."""
        self._loop.run(self._search(replace(search, tokens=min(search.tokens, WARM_TOKENS)), 1))
        self._loop.run(self._engine.clear_cache())
        return self._loop.run(self._search(search, 2))

    def close(self) -> None:
        """Stop the engine."""
        self._loop.run(self._engine.close())
        self._loop.close()

    async def _search(self, search: Search, seed: int) -> Seen:
        start, seen, beams = time.perf_counter(), Seen(0.0, 0.0), [make_prompt(search, seed)]
        for turn in range(search.rounds):
            each = search.beams // len(beams)
            keys = [range(first, first + each) for first in range(turn << 10, (turn << 10) + search.beams, each)]
            grown = await asyncio.gather(
                *(self._grow(beam, own, search.tokens, seed) for beam, own in zip(beams, keys, strict=True))
            )
            beams = list(chain.from_iterable(grown))
            begun = time.perf_counter()
            scores = await self._score(search, beams, seen)
            seen.scoring += time.perf_counter() - begun
            beams = choose(search, beams, scores)
        seen.seconds = time.perf_counter() - start
        return seen

    async def _grow(self, beam: Beam, keys: range, tokens: int, seed: int) -> list[Beam]:
        branches = tuple(Branch(seed, key, tokens) for key in keys)
        request = GenerateRequest(self._create_name(), POLICY, beam.path, branches, _SAMPLING)
        steps: dict[int, tuple[int, ...]] = {}
        async for event in self._engine.generate(request):
            if isinstance(event, Completion):
                steps[event.index] = require_ids(event.token_ids)
        return [beam.grow(steps[index]) for index in sorted(steps)]

    async def _score(self, search: Search, beams: Sequence[Beam], seen: Seen) -> list[float]:
        """Return a score for each beam."""
        if search.scores == "none":
            return [0.0] * len(beams)
        if search.scores == "prm":
            parts = [(beam.prompt, *(part for step in beam.steps for part in (step, SEPARATOR))) for beam in beams]
            items = [ScoreItem(own, (len(own) - 1,)) for own in parts]
            request = ScoreRequest(self._create_name(), PRM, tuple(items))
        else:
            items = [ScoreItem((beam.path, QUESTION), (1,)) for beam in beams]
            request = ScoreRequest(self._create_name(), POLICY, tuple(items), GRADES)
        scores = []
        for result in await self._engine.score(request):
            assert result.values is not None  # no bound was given
            seen.computed += result.computed_tokens
            shares = torch.tensor(result.values[0]).softmax(0)
            scores.append(float(shares @ torch.arange(len(shares), dtype=shares.dtype)))
        return scores

    def _create_name(self) -> str:
        self._requests += 1
        return f"request {self._requests}"


def run_peer(python: Path, folder: Path, searches: Sequence[Search]) -> Peers:
    """Return what vLLM took for the searches that it finished; its output goes to this process's error output."""
    done = subprocess.run(
        [str(python), "-m", "benchmarks.gpu.search_vllm", str(folder)],
        input=json.dumps([asdict(search) for search in searches]),
        stdout=subprocess.PIPE,
        text=True,
        timeout=_PEER_SECONDS,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    if done.returncode:
        print(f"vLLM ended with status {done.returncode} after {len(found)} searches", file=sys.stderr)
    return {(name, scores): Seen(**seen) for name, scores, seen in found}


def markdown(rows: Sequence[tuple[Search, Seen]], peers: Peers) -> str:
    """Return the table; a column for vLLM if it ran."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    lines = [
        f"{gpu}. Policy and PRM: shapes of Llama 3.1 8B, random weights, bf16. Each search from a cold cache, with "
        "compiled kernels; all tokens of a search over its whole time.",
        "",
        "| search | scores | time | of it scores | tokens/s | tokens computed for scores |"
        + (" vLLM | its time / ours |" if peers else ""),
        "|---|---|---:|---:|---:|---:|" + ("---:|---:|" if peers else ""),
    ]
    for search, seen in rows:
        line = (
            f"| {search.name} | {search.scores} | {seen.seconds:.2f} s | {seen.scoring:.2f} s "
            f"| {search.generated / seen.seconds:,.0f} | {seen.computed:,} |"
        )
        peer = peers.get((search.name, search.scores))
        if peers:
            line += " | |" if peer is None else f" {peer.seconds:.2f} s | {peer.seconds / seen.seconds:.2f} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
