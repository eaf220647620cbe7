"""Branches of models with states or latents, with the cache and without: ``python -m benchmarks.engine.branching``.

Best of 16 (a prompt of 512 tokens, 16 solutions of 64) and a tree search (8 rounds of 8 branches of 32 tokens, of
which the first two go on with four each). Once as the engine runs them, and once as an engine would that cannot fork
such models: every branch computes all tokens before it. Each branch then has a cache of its own by a ``cache_salt``;
they run together all the same. Models are random, of about 30M parameters, and computed in deterministic mode, in which
both ways must give the same bits.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engine.checkpoint import write_tokenizer
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.request_checks import require_ids
from engine.protocol.types import Branch, Completion, GenerateRequest, SamplingParams, TokenIds

_VOCAB = 8000
_SIZES = {
    **{"vocab_size": _VOCAB, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048},
    **{"tie_word_embeddings": False, "eos_token_id": _VOCAB - 1, "bos_token_id": None, "pad_token_id": None},
}
_DELTA = {
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "linear_conv_kernel_dim": 4,
}
_LATENT = {
    **{"num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64},
    **{
        "qk_rope_head_dim": 32,
        "head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
    },
    **{"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "first_k_dense_replace": 1},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "Qwen3.5": ("Qwen3_5ForCausalLM", _DELTA | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2}),
    "LFM2": (
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2, "block_auto_adjust_ff_dim": False},
    ),
    "Granite 4": (
        "GraniteMoeHybridForCausalLM",
        {"layer_types": (["mamba"] * 3 + ["attention"]) * 2, "shared_intermediate_size": 1536, "num_local_experts": 0}
        | {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128},
    ),
    "Nemotron-H": (
        "NemotronHForCausalLM",
        {"layers_block_type": (["mamba", "mlp"] * 3 + ["attention", "mlp"]) * 2, "num_hidden_layers": 16}
        | {"mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 4},
    ),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", _LATENT),
    "Gemma 4": (
        "Gemma4ForCausalLM",
        {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2, "sliding_window": 256, "pad_token_id": 0}
        | {"global_head_dim": 128, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": _VOCAB}
        | {"num_kv_shared_layers": 4},
    ),
}
_COLUMNS = "model", "search", "tokens, cached", "recomputed", "s, cached", "recomputed", "times", "bits"
PROMPT, SAMPLES, TOKENS, ROUNDS, BEAM, KEPT, STEP = 512, 16, 64, 8, 8, 2, 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run: its seconds, the tokens that the model read or wrote, and all results."""

    seconds: float
    computed: int
    completions: tuple[Completion, ...]


def save_model(name: str, folder: Path) -> None:
    """Write random weights of one of ``MODELS``."""
    import torch
    import transformers

    architecture, options = MODELS[name]
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    model_class(model_class.config_class(**(_SIZES | options))).save_pretrained(folder)
    write_tokenizer(folder, _VOCAB)


class Search:
    """Runs both searches on one engine."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._count = 0

    async def best_of_n(self, prompt: TokenIds, *, is_shared: bool) -> Outcome:
        """Generate ``SAMPLES`` solutions."""
        await self._engine.clear_cache()
        started = time.perf_counter()
        branches = [(prompt, Branch(1, key, TOKENS)) for key in range(SAMPLES)]
        found = await self._generate(branches, is_shared=is_shared)
        return Outcome(time.perf_counter() - started, _count_computed(found), tuple(found))

    async def search_tree(self, prompt: TokenIds, *, is_shared: bool) -> Outcome:
        """Continue the first ``KEPT`` branches of each round, whatever their worth: the work is that of any choice."""
        await self._engine.clear_cache()
        started, parents, found = time.perf_counter(), [prompt], list[Completion]()
        for number in range(ROUNDS):
            texts = [parent for parent in parents for _ in range(BEAM // len(parents))]
            branches = [(text, Branch(number, key, STEP)) for key, text in enumerate(texts)]
            completions = await self._generate(branches, is_shared=is_shared)
            found += completions
            first = zip(texts, completions[:KEPT], strict=False)
            parents = [(*text, *require_ids(one.token_ids)) for text, one in first]
        return Outcome(time.perf_counter() - started, _count_computed(found), tuple(found))

    async def _generate(self, branches: Sequence[tuple[TokenIds, Branch]], *, is_shared: bool) -> list[Completion]:
        return list(await asyncio.gather(*(self._complete(*one, is_shared=is_shared) for one in branches)))

    async def _complete(self, prompt: TokenIds, branch: Branch, *, is_shared: bool) -> Completion:
        self._count += 1
        request = GenerateRequest(
            f"request-{self._count}",
            "model",
            prompt,
            (branch,),
            SamplingParams(ignore_eos=True),
            cache_salt=None if is_shared else str(self._count),
        )
        async for event in self._engine.generate(request):
            if isinstance(event, Completion):
                return event
        raise RuntimeError("the request ended without a completion")


def _count_computed(completions: Sequence[Completion]) -> int:
    return sum(one.prompt_tokens - one.cached_tokens + len(one.token_ids) for one in completions)


def _have_same_bits(first: Outcome, second: Outcome) -> bool:
    pairs = zip(first.completions, second.completions, strict=True)
    return all((one.token_ids, one.logprob) == (other.token_ids, other.logprob) for one, other in pairs)


async def measure(name: str, rounds: int) -> list[tuple[str, ...]]:
    """Return a model's rows of the table, one for each search."""
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(name, Path(folder))
        engine = LocalEngine({"model": folder}, EngineOptions(deterministic=True, max_running=32))
        try:
            search = Search(engine)
            prompt = tuple(7 + 13 * index % (_VOCAB - 20) for index in range(PROMPT))
            for label, run in (("best of 16", search.best_of_n), ("tree search", search.search_tree)):
                pairs = [
                    (await run(prompt, is_shared=True), await run(prompt, is_shared=False)) for _ in range(rounds + 1)
                ][1:]  # the first pair compiles
                rows.append((name, label, *_compare(pairs)))
        finally:
            await engine.close()
    return rows


def _compare(pairs: Sequence[tuple[Outcome, Outcome]]) -> tuple[str, ...]:
    """Return the columns of runs with the cache and without it."""
    with_cache, without = (statistics.median(pair[way].seconds for pair in pairs) for way in (0, 1))
    tokens = [f"{outcome.computed:,}" for outcome in pairs[0]]
    bits = "equal" if all(_have_same_bits(*pair) for pair in pairs) else "different"
    return (*tokens, f"{with_cache:.2f}", f"{without:.2f}", f"{without / with_cache:.1f}", bits)


def main() -> None:
    """Print the table, and write it with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each way; medians are shown")
    parser.add_argument("--out", type=Path, help="folder for table.md")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows: list[tuple[str, ...]] = []
    for name in arguments.models.split(","):
        rows += asyncio.run(measure(name, arguments.rounds))
        print(f"{name} is measured", file=sys.stderr)
    table = Table(*_COLUMNS)
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        lines = [_COLUMNS, ("---",) * len(_COLUMNS), *rows]
        (arguments.out / "table.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))


if __name__ == "__main__":
    main()
