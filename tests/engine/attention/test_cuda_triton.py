"""Plans of the GPU attention backend, run with the kernel's reference: whole steps compared with dense attention in
float64.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.cuda_triton import TritonAttention
from engine.attention.layer import LayerAttentionConfig
from engine.attention.plan import AttentionCostModel, AttentionMetadata
from kernels.common.attention_schedule import COUNT
from kernels.quantize import quantize_vectors
from tests.engine.attention.test_attention import ALWAYS, DIM, KV_HEADS, NEVER, PAGE, PER_KV, POOL, USUAL, Step
from tests.seeds import shift


@pytest.mark.parametrize("cost", [ALWAYS, NEVER, USUAL], ids=["always", "never", "usual"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, None), (40, 1.5)])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_steps_equal_dense_attention_in_float64(
    cost: AttentionCostModel, window: int | None, softcap: float | None, trees: bool
) -> None:
    about = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4, window, softcap)
    for seed in range(3):
        step = Step(seed, cost, trees=trees)
        ours = step.attend(about, TritonAttention)
        step.check(ours, about)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_attention_reads_what_was_quantized_on_writing(dtype: torch.dtype) -> None:
    """The output equals dense attention to the quantized keys and values, which are close to the original ones."""
    about = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4)
    step = Step(2, USUAL)
    written = step.kv.clone()
    numbers, scales = quantize_vectors(step.kv, dtype)
    attend = TritonAttention([about], numbers, scales)
    attend.prepare(step.metadata)
    ours = attend(0, step.q, step.k, step.v)
    step.kv = numbers.float() * scales[..., None]
    step.check(ours, about)
    written[0].flatten(2, 3)[:, :, torch.from_numpy(step.metadata.slots)] = torch.stack(
        (step.k.transpose(0, 1), step.v.transpose(0, 1))
    )
    held = written < 1e20
    # Half a quantization step: the largest number of a vector has 127 steps in int8, 3 bits after the leading one in
    # float8.
    vectors = written.where(held, 0)
    step_of = vectors.abs() / 2**3 if dtype != torch.int8 else vectors.abs().amax(-1, keepdim=True) / 127
    least = vectors.abs().amax(-1, keepdim=True) / 448 / 2**9 + 1e-30
    off = (step.kv.where(held, 0) - vectors).abs()
    assert (off <= 0.5001 * torch.maximum(step_of, least)).all()


def decode(contexts: list[int]) -> AttentionMetadata:
    """Decode one new token for each of some sequences without common pages."""
    lengths = np.array(contexts)
    pages = np.arange(len(contexts) * 40).reshape(len(contexts), 40)
    return AttentionMetadata(pages, np.ones_like(lengths), lengths, PAGE, POOL, KV_HEADS, PER_KV, NEVER)


def test_decoding_steps_of_one_shape_use_the_same_memory() -> None:
    """Steps have the same shape if their sizes round up to the same powers of two."""
    about = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4)
    attend = TritonAttention([about], torch.zeros(1, 2, KV_HEADS, POOL, PAGE, DIM))
    attend.prepare(decode([70, 90, 95, 81, 99]))
    first, work = attend.buffers, attend.buffers[0].work
    assert int((work.low[:, COUNT] > 0).sum()) == 5
    attend.prepare(decode([71, 91, 96, 82, 100, 66]))
    assert attend.buffers == first
    assert int((work.low[:, COUNT] > 0).sum()) == 6
    attend.prepare(decode([71, 91, 96]))
    assert attend.buffers != first
    attend.prepare(decode([71, 91, 96, 82, 100]))
    assert attend.buffers == first
    assert int((work.low[:, COUNT] > 0).sum()) == 5


def test_padding_does_not_change_outputs_or_the_cache() -> None:
    """Sequences get the outputs that they get alone, and so does the cache, although the padding is NaN."""
    about = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4)
    torch.manual_seed(shift(0))
    kv = torch.randn(1, 2, KV_HEADS, POOL, PAGE, DIM)
    q, k, v = (torch.randn(8, heads, DIM) for heads in (about.heads, KV_HEADS, KV_HEADS))
    for x in (q, k, v):
        x[5:] = torch.nan
    results = []
    for tokens in (5, 8):
        attend = TritonAttention([about], kv.clone())
        attend.prepare(decode([70, 90, 95, 81, 99]))
        results.append((attend(0, q[:tokens], k[:tokens], v[:tokens])[:5], attend._kv))
    for alone, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, alone, atol=0, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_captured_graph_computes_other_steps_of_the_same_shape() -> None:
    about = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4)
    torch.manual_seed(shift(0))
    kv = torch.randn(1, 2, KV_HEADS, POOL, PAGE, DIM, device="cuda")
    q, k, v = (torch.randn(6, heads, DIM, device="cuda") for heads in (about.heads, KV_HEADS, KV_HEADS))
    attend, eager = TritonAttention([about], kv), TritonAttention([about], kv.clone())
    for backend in (attend, eager):
        backend.prepare(decode([70, 90, 95, 81, 99, 66]))
        backend(0, q, k, v)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(0, q, k, v)
    buffers = attend.buffers
    for contexts in ([71, 91, 96, 82, 100, 67], [72, 92, 97, 83, 101, 1]):
        for backend in (attend, eager):
            backend.prepare(decode(contexts))
        assert attend.buffers == buffers
        graph.replay()
        torch.testing.assert_close(captured, eager(0, q, k, v), atol=0, rtol=0)
