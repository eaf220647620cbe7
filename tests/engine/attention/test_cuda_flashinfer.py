"""Steps that FlashInfer computes: its arguments, beside dense attention in float64, and the steps that it gets."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import cuda_flashinfer, flashinfer_times, select
from engine.attention.cuda_flashinfer import FlashInferAttention, StepArrays, find_missing, load_flashinfer
from engine.attention.cuda_triton import MAX_REPEATABLE_QUERIES, TritonAttention
from engine.attention.flashinfer_times import StepTime, StepTimes
from engine.attention.layer import LayerAttentionConfig
from engine.attention.plan import AttentionMetadata, TreeMask
from tests.closeness import assert_rounded, unit_bound
from tests.engine.attention import fake_flashinfer
from tests.engine.attention.test_attention import ALWAYS, KV_HEADS, NEVER, Step
from tests.engine.conftest import Checkpoints
from tests.engine.gpu import EmulatedGraph, emulate_gpu
from tests.engine.helpers import SMALL
from tests.engine.runner.test_gpu_engine import agree, answers

BF16, DIM = torch.bfloat16, 64
LIMITS = [(None, None), (9, None), (40, 1.5)]


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    """Forget the package and the caches of other tests."""
    yield
    load_flashinfer.cache_clear()
    flashinfer_times.step_times.cache_clear()
    fake_flashinfer.CACHES.clear()


def layer(per_kv: int, window: int | None = None, softcap: float | None = None) -> LayerAttentionConfig:
    return LayerAttentionConfig(KV_HEADS * per_kv, KV_HEADS, DIM, 0.2, window, softcap)


def random_step(seed: int, per_kv: int = 3, page: int = 4, dtype: torch.dtype = BF16) -> Step:
    """Return a step of 16-bit keys. Every third one decodes."""
    step = Step(seed, NEVER, page=page, dim=DIM, per_kv=per_kv)
    if seed % 3 == 0:
        tokens = np.cumsum(step.query_lens) - 1
        step.seq_lens = [length - queries + 1 for length, queries in zip(step.seq_lens, step.query_lens, strict=True)]
        step.query_lens = [1] * len(step.seq_lens)
        step.q, step.k, step.v = (x[tokens] for x in (step.q, step.k, step.v))
        lengths = {"query_lens": np.array(step.query_lens), "seq_lens": np.array(step.seq_lens)}
        step.metadata = replace(step.metadata, **lengths)
    step.kv, step.q, step.k, step.v = (x.to(dtype) for x in (step.kv, step.q, step.k, step.v))
    return step


def create(step: Step, layers: list[LayerAttentionConfig], *, has_graphs: bool = False) -> FlashInferAttention:
    """Return attention that leaves all steps to FlashInfer that it can compute."""
    kv = step.kv.expand(len(layers), *step.kv.shape[1:]).contiguous()
    fake_flashinfer.CACHES.append(kv)
    return FlashInferAttention(layers, kv, fake_flashinfer, lambda _: True, has_graphs=has_graphs)  # type: ignore[arg-type]


def compare(step: Step, about: LayerAttentionConfig, attend: FlashInferAttention, index: int = 0) -> None:
    """Compare one layer with float64: the stand-in rounds once, to 16 bits."""
    ours = attend(index, step.q, step.k, step.v)
    step.kv = attend._kv[index][None]
    exact = step.expected(about)
    about_dtype = torch.finfo(step.q.dtype)
    unit = torch.maximum(exact.abs(), torch.tensor(about_dtype.smallest_normal)) * about_dtype.eps
    assert_rounded(ours, exact, unit / 2 * (1 + 1e-9))


@pytest.mark.parametrize(("window", "softcap"), LIMITS)
@pytest.mark.parametrize(("per_kv", "page"), [(1, 16), (3, 4), (5, 8)])
def test_steps_equal_dense_attention_in_float64(
    per_kv: int, page: int, window: int | None, softcap: float | None
) -> None:
    """Decoding steps, chunks of prompts, and both in one; last pages are full or not; two shapes share one backend."""
    about, kinds = layer(per_kv, window, softcap), set()
    for seed in range(6):
        step = random_step(seed, per_kv, page, torch.float16 if seed % 2 else BF16)
        attend = create(step, [about])
        attend.prepare(step.metadata)
        assert attend._planned
        assert not attend.is_repeatable
        kinds.add(step.metadata.is_decode)
        compare(step, about, attend)
    assert kinds == {False, True}


def test_every_layer_is_planned_with_its_own_window_cap_and_scale() -> None:
    layers = [layer(3), layer(3, 9), layer(3), layer(3, 9, 1.5), replace(layer(3), scale=0.1)]
    for seed in (1, 3):
        step = random_step(seed)
        attend = create(step, layers)
        attend.prepare(step.metadata)
        assert len(attend._planned) == 4
        for index, about in enumerate(layers):
            compare(step, about, attend, index)


def test_a_backend_computes_steps_of_either_kernel_in_turn() -> None:
    about = layer(3)
    first = next(
        step for seed in count(2) if (step := random_step(seed)).metadata.query_lens.max() > MAX_REPEATABLE_QUERIES
    )
    attend = create(first, [about], has_graphs=True)
    one_row = {name: getattr(first.metadata, name)[:1] for name in ("page_table", "seq_lens")}
    few = replace(first.metadata, query_lens=np.ones(1, np.int64), **one_row)
    for metadata in (first.metadata, few, first.metadata):
        attend.prepare(metadata)
        assert attend.is_repeatable == (metadata is few) == (not attend._planned)
    compare(first, about, attend)


def plant_last_page(arrays: StepArrays) -> StepArrays:
    return arrays._replace(last_page_lens=torch.full_like(arrays.last_page_lens, 4))


def plant_page_starts(arrays: StepArrays) -> StepArrays:
    starts = arrays.page_starts.clone()
    starts[1:-1] += 1
    return arrays._replace(page_starts=starts)


def plant_query_starts(arrays: StepArrays) -> StepArrays:
    starts = arrays.query_starts.clone()
    starts[1:-1] -= 1
    return arrays._replace(query_starts=starts)


@pytest.mark.parametrize("bug", [plant_last_page, plant_page_starts, plant_query_starts])
def test_planted_errors_of_the_arrays_are_found(
    bug: Callable[[StepArrays], StepArrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = cuda_flashinfer.lay_out_pages
    step = random_step(4)
    attend = create(step, [layer(3)])
    monkeypatch.setattr(cuda_flashinfer, "lay_out_pages", lambda *arguments: bug(right(*arguments)))
    with pytest.raises((AssertionError, ValueError)):  # noqa: PT012 -- either step may find it
        attend.prepare(step.metadata)
        compare(step, layer(3), attend)


@pytest.mark.parametrize("off", [-1, 1])
def test_a_planted_window_that_is_off_by_one_is_found(off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cuda_flashinfer.count_earlier_keys
    monkeypatch.setattr(cuda_flashinfer, "count_earlier_keys", lambda window: right(window) + off)
    step = random_step(2)
    attend = create(step, [layer(3, 9)])
    attend.prepare(step.metadata)
    with pytest.raises(AssertionError):
        compare(step, layer(3, 9), attend)


def test_planted_views_are_found() -> None:
    """Values that are read as keys, and a copy of the cache."""
    step = random_step(2)
    attend = create(step, [layer(3)])
    attend.prepare(step.metadata)
    [(keys, values)] = attend._pages
    attend._pages = [(values, keys)]
    with pytest.raises(AssertionError):
        compare(step, layer(3), attend)
    attend._pages = [(keys.clone(), values)]
    with pytest.raises(ValueError, match="no copy"):
        attend(0, step.q, step.k, step.v)


def test_run_needs_a_plan_of_its_own_step() -> None:
    step = random_step(2)
    attend = create(step, [layer(3)])
    attend.prepare(step.metadata)
    with pytest.raises(ValueError, match="the planned queries"):
        attend(0, *(x[:-1] for x in (step.q, step.k, step.v)))


def metadata(query_lens: list[int], contexts: list[int], **options: object) -> AttentionMetadata:
    """Return a step whose rows begin with the same pages."""
    pages = np.tile(np.arange(100), (len(contexts), 1))
    lengths = np.array(query_lens), np.array(contexts)
    return replace(AttentionMetadata(pages, *lengths, 4, 700, KV_HEADS, 3, NEVER), **options)


def test_graphs_trees_and_shared_prefixes_stay_with_triton() -> None:
    large, limit = [MAX_REPEATABLE_QUERIES + 1, 1], [MAX_REPEATABLE_QUERIES, 1]
    tree = {0: TreeMask(np.zeros(1, np.int64), np.eye(1, dtype=np.bool_))}
    step = random_step(2)
    for window in (None, 9):
        captured, other = (create(step, [layer(3, window)], has_graphs=each) for each in (True, False))
        fake_flashinfer.CACHES.append(captured._kv)
        for each, about, expected in (
            (captured, metadata(large, [90, 90]), True),
            (captured, metadata(limit, [90, 90]), False),
            (other, metadata(limit, [90, 90]), True),
            (other, metadata(large, [90, 90], tree_masks=tree), False),
            (other, metadata([1, 1], [90, 90]), True),
            (other, metadata([1, 1], [90, 90], cost_model=ALWAYS), window is not None),
        ):
            assert each._should_use(about) is expected


def test_the_nearest_measured_step_of_the_kind_decides() -> None:
    faster, slower, same = {"flashinfer_us": 5.0}, {"flashinfer_us": 20.0}, {"flashinfer_us": 9.8}
    steps = [
        StepTime(1, 512, 512, 10.0, **faster),
        StepTime(1, 512, 4096, 10.0, **slower),
        StepTime(8, 4096, 4096, 10.0, **same),
        StepTime(8, 8, 4096, 10.0, **faster),
    ]
    times = StepTimes(steps, "")
    assert {step.kind for step in steps} == {"prefill", "decode"}
    assert times.is_flashinfer_faster(metadata([512], [512]))
    assert times.is_flashinfer_faster(metadata([300], [300]))
    assert not times.is_flashinfer_faster(metadata([500], [3000]))
    assert not times.is_flashinfer_faster(metadata([60], [60]))  # far from all
    assert not times.is_flashinfer_faster(metadata([512] * 8, [512] * 8))  # within the noise
    assert times.is_flashinfer_faster(metadata([1] * 8, [512] * 8))
    assert not times.is_flashinfer_faster(metadata([1] * 64, [512] * 64))
    assert not StepTimes([], "").is_flashinfer_faster(metadata([512], [512]))


def test_every_entry_of_the_file_can_be_read() -> None:
    for name, entry in json.loads(flashinfer_times.FILE.read_text()).items():
        assert name.strip() == name
        assert set(entry) == {"steps", "source"}
    for times in flashinfer_times.read_times().values():
        assert times.steps
        assert times.source
        assert all(min(step.triton_us, step.flashinfer_us) > 0 for step in times.steps)


def kv_cache(dtype: torch.dtype = BF16, dim: int = DIM) -> Tensor:
    kv = torch.zeros(1, 2, KV_HEADS, 8, 4, dim, dtype=dtype)
    fake_flashinfer.CACHES.append(kv)
    return kv


def choose(kv: Tensor) -> TritonAttention:
    about = replace(layer(3), head_dim=kv.shape[-1])
    return select.create_gpu_attention([about], kv, None, has_graphs=False)


def test_only_a_measured_gpu_with_16_bit_keys_gets_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)
    assert type(choose(kv_cache())) is TritonAttention
    monkeypatch.setattr(select, "step_times", lambda _: StepTimes([], ""))
    assert type(choose(kv_cache())) is FlashInferAttention
    assert type(choose(kv_cache(torch.float32))) is TritonAttention
    assert type(choose(kv_cache(dim=96))) is TritonAttention


def test_a_gpu_without_an_entry_never_imports_flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "times.json"
    entry = {"steps": [{"rows": 1, "tokens": 9, "keys": 9, "triton_us": 2.0, "flashinfer_us": 1.0}], "source": "a test"}
    path.write_text(json.dumps({"a measured GPU": entry}))
    read_times = flashinfer_times.read_times
    monkeypatch.setattr(flashinfer_times, "read_times", lambda: read_times(path))
    names = iter(["another GPU", "a measured GPU"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name=next(names)))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert flashinfer_times.step_times(torch.device("cuda", 0)) is None
    times = flashinfer_times.step_times(torch.device("cuda", 1))
    assert times is not None
    assert times.steps == (StepTime(1, 9, 9, 2.0, 1.0),)
    assert type(choose(kv_cache())) is TritonAttention


def test_a_missing_package_leaves_all_steps_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "step_times", lambda _: StepTimes([], ""))
    monkeypatch.setattr(cuda_flashinfer, "find_spec", lambda _: None)
    assert type(choose(kv_cache())) is TritonAttention


class OlderPrefill(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:  # type: ignore[override]
        return q


def test_a_version_with_another_interface_is_logged_once_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(select, "step_times", lambda _: StepTimes([], ""))
    fake_flashinfer.install(monkeypatch, **{cuda_flashinfer.PREFILL: OlderPrefill, "__version__": "0.0.9"})
    with caplog.at_level(logging.INFO):
        assert type(choose(kv_cache())) is type(choose(kv_cache())) is TritonAttention
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "0.0.9" in record.getMessage()
    assert "BatchPrefillWithPagedKVCacheWrapper.run" in record.getMessage()
    assert "out" in record.getMessage()
    older = fake_flashinfer.install(monkeypatch)
    del vars(older)[cuda_flashinfer.DECODE]
    assert str(find_missing(older)).startswith("BatchDecodeWithPagedKVCacheWrapper.__init__")
    assert find_missing(fake_flashinfer.install(monkeypatch)) is None


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_window", "qwen3_moe"])
def test_an_engine_with_flashinfer_samples_the_same_tokens_as_the_cpu(
    kind: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, which the stand-in computes too. Decoding uses FlashInfer only where no graphs are captured."""
    expected = answers(checkpoints(kind), replace(SMALL, device="cpu"))
    kinds = set()

    def is_faster(metadata: AttentionMetadata) -> bool:
        kinds.add("decode" if metadata.is_decode else "prefill")
        return True

    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr(fake_flashinfer, "DTYPES", (torch.float32,))
    monkeypatch.setattr(fake_flashinfer, "HEAD_DIMS", range(8, 65))
    monkeypatch.setattr(select, "is_supported", lambda *_: True)
    monkeypatch.setattr(select, "step_times", lambda _: SimpleNamespace(is_flashinfer_faster=is_faster))
    emulate_gpu(monkeypatch)
    agree(answers(checkpoints(kind)), expected, checkpoints(kind))
    assert kinds == ({"prefill", "decode"} if kind == "qwen3_moe" else {"prefill"})
    assert (EmulatedGraph.replayed > 0) == (kind != "qwen3_moe")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(("window", "softcap"), LIMITS)
def test_the_package_computes_steps_as_float64_does(window: int | None, softcap: float | None) -> None:
    """Two units of 16 bits for the result, and as much for the weights, which its kernels round to 16 bits."""
    flashinfer = pytest.importorskip("flashinfer")
    assert find_missing(flashinfer) is None
    about = layer(5, window, softcap)
    for seed in range(6):
        step = random_step(seed, per_kv=5, page=16)
        attend = FlashInferAttention([about], step.kv.cuda(), flashinfer, lambda _: True, has_graphs=False)
        attend.prepare(step.metadata)
        assert attend._planned
        ours = attend(0, *(x.cuda() for x in (step.q, step.k, step.v))).cpu()
        step.kv = attend._kv.cpu()
        exact = step.expected(about)
        held = step.kv[step.kv < 1e20].abs().max()
        assert_rounded(ours, exact, 2 * unit_bound(BF16) * float(held))
