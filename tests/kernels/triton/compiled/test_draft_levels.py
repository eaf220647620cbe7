"""Whole drafts on tensors without memory: the host waits for nothing, and every kernel compiles.

Reading a number of such a tensor, or an operation whose shape depends on numbers, raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from engine.attention.layer import HeadShape
from engine.cache.page_table import PageTable
from engine.cache.paged_kv import KVCache
from engine.device import DeviceConfig, select_kv_dtype
from engine.models.interface import Model
from engine.models.load import load_model
from engine.protocol.types import SamplingParams
from engine.speculation.drafter import DraftRequest
from engine.speculation.drafters.device_chain import DeviceChains
from engine.speculation.drafters.device_trees import EagleTrees
from engine.speculation.drafters.draft_entries import Span
from engine.speculation.drafters.eagle import load_eagle
from engine.speculation.drafters.fused_chain import ChainStart
from engine.speculation.drafters.proposal import DraftSampler
from tests.engine.conftest import save_random_model
from tests.engine.gpu import EmulatedPool
from tests.engine.speculation.heads import save_head
from tests.kernels.triton.hopper import SHARED_MEMORY, compiling
from tests.long import mostly_long

PAGE, CONTEXT, HIDDEN, HEADS, KV_HEADS, DIM, INNER = 16, 512, 512, 8, 4, 128, 256
META = DeviceConfig(torch.device("meta"), torch.bfloat16, uses_gpu_kernels=True)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": DIM, "num_hidden_layers": 1}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "tie_word_embeddings": True}
    save_random_model("Qwen3ForCausalLM", sizes | heads, tmp_path)
    return load_model(tmp_path, lambda _: CONTEXT, META)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    monkeypatch.setattr("engine.speculation.drafters.device_levels.GraphPool", EmulatedPool)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))


def cache_for(kv_dtype: str) -> KVCache:
    return KVCache(
        layers=[HeadShape(KV_HEADS, KV_HEADS, DIM)] * 2,
        pages=64,
        page_size=PAGE,
        rows=8,
        context=CONTEXT,
        device_config=META,
        dtype=select_kv_dtype(kv_dtype, META),
    )


def sequences() -> list[Any]:
    """Return branches with all that drafts read of them."""
    params = SamplingParams(temperature=0.7)
    return [
        SimpleNamespace(
            has_logits_processors=False,
            sampling=params,
            seed=1,
            key=key,
            tokens=list(range(40 + key)),
            terminal_tokens=frozenset((2,)),
        )
        for key in range(3)
    ]


def eagle(model: Model, folder: Path, kv_dtype: str, *, is_tree: bool) -> tuple[EagleTrees, list[Any], list[Span]]:
    queries, keys, mlp = HEADS * DIM, KV_HEADS * DIM, "layer.mlp."
    shapes = {"fc": (HIDDEN, 2 * HIDDEN), "layer.self_attn.q_proj": (queries, HIDDEN)}
    shapes |= {f"layer.self_attn.{name}_proj": (keys, HIDDEN) for name in "kv"}
    shapes |= {"layer.self_attn.o_proj": (HIDDEN, queries), f"{mlp}gate_proj": (INNER, HIDDEN)}
    shapes |= {f"{mlp}up_proj": (INNER, HIDDEN), f"{mlp}down_proj": (HIDDEN, INNER)}
    tensors = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    config = {"kind": "eagle", "hidden_size": HIDDEN, "vocab_size": 400, "intermediate_size": INNER}
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM}
    config |= {"layer_norm_eps": 1e-6, "rope_theta": 1e4}
    head = save_head(folder / "head", config, tensors | {"hidden_norm.weight": torch.ones(HIDDEN)})
    drafter = load_eagle(head, model)
    drafter.reset(cache_for(kv_dtype))
    assert drafter._trees is not None
    requests = [DraftRequest(sequence, 4, 12 if is_tree else 4) for sequence in sequences()]
    spans = [
        Span(PageTable(row, [], None, None, 0, 0), len(request.sequence.tokens) - 1 - row - 1, row + 1)
        for row, request in enumerate(requests)
    ]
    return drafter._trees, requests, spans


@pytest.mark.parametrize(
    "is_tree", mostly_long([pytest.param(True, id="tree"), pytest.param(False, id="chain")], every=2)
)
def test_an_eagle_draft_waits_for_the_gpu_only_once_it_is_complete(
    model: Model, is_tree: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: None)
    trees, requests, spans = eagle(model, tmp_path, "auto", is_tree=is_tree)
    for _ in range(2):
        trees._draft(requests, spans)
    with pytest.raises(NotImplementedError, match="meta tensor"):
        trees(requests, spans)


@pytest.mark.parametrize("width", [1, 4])
def test_a_draft_models_chain_waits_for_the_gpu_only_once_it_is_complete(
    model: Model, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: None)
    chains, sampler = DeviceChains(model, cache_for("auto")), DraftSampler(sequences())
    starts = [ChainStart(row, one.tokens[-2:], len(one.tokens)) for row, one in enumerate(sampler.sequences)]
    for _ in range(2):
        chains._draft(starts, range(3), sampler, 4, width)
    with pytest.raises(NotImplementedError, match="meta tensor"):
        chains(starts, sampler, 4, width)


def draft_once(model: Model, folder: Path, kv_dtype: str) -> Callable[[], object]:
    trees, requests, spans = eagle(model, folder, kv_dtype, is_tree=True)
    return lambda: trees._draft(requests, spans)


@pytest.mark.long  # half a minute of compilation each
@pytest.mark.parametrize(("kv_dtype", "capability"), [("auto", 90), ("auto", 100), ("int8", 90), ("int4", 90)])
def test_the_kernels_of_a_draft_compile(model: Model, tmp_path: Path, kv_dtype: str, capability: int) -> None:
    compute = draft_once(model, tmp_path, kv_dtype)
    with compiling(capability) as made:
        compute()
    launched = {kernel.kernel for kernel in made}
    assert {"_sort_chunks", "_rank", "_grow", "_attend_level", "merge_parts", "_rotary_write"} <= launched
    for kernel in made:
        assert kernel.spills == kernel.stack == 0, kernel
        assert kernel.shared <= SHARED_MEMORY, kernel
        assert kernel.registers <= {"_grow": 168, "_attend_level": 232, "_rank": 96}.get(kernel.kernel, 128), kernel
