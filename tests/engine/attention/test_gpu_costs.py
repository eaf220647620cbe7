"""Costs of shared prefixes by GPU: the file's entries, GPUs without one, and what is decided with them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from engine.attention import gpu_costs
from engine.attention.gpu_costs import GpuCosts, read_costs
from engine.attention.layer import LayerAttentionConfig
from engine.attention.plan import AttentionCostModel
from engine.runner import batch
from kernels.common.int4 import INT4

LAYER = LayerAttentionConfig(32, 8, 128, 128**-0.5)
CUDA = torch.device("cuda")
TOKEN_BYTES = 2 * 8 * 128 * 2


@pytest.fixture(autouse=True)
def no_costs_are_kept() -> Iterator[None]:
    """Forget the costs of devices, which are mocked here."""
    yield
    gpu_costs.gpu_costs.cache_clear()
    batch._create_cost_model.cache_clear()


def properties(name: str, multiprocessors: int = 66, bus_width: int = 1536) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, multi_processor_count=multiprocessors, memory_clock_rate=3_201_000, memory_bus_width=bus_width
    )


def mock_gpu(monkeypatch: pytest.MonkeyPatch, about: SimpleNamespace) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)


def test_every_entry_has_all_numbers_and_known_dtypes() -> None:
    entries = json.loads(gpu_costs.FILE.read_text())
    assert gpu_costs._REFERENCE in entries
    for name, entry in entries.items():
        assert name.strip() == name
        assert set(entry) == set(GpuCosts.__dataclass_fields__)
        assert entry["prefix_us"] >= 0
        assert entry["query_us"] >= 0
        assert entry["multiprocessors"] > 0
        assert entry["source"]
        assert entry["read_gb_s"]
        for dtype, rate in entry["read_gb_s"].items():
            assert isinstance(getattr(torch, dtype), torch.dtype)
            assert rate > 0


@pytest.mark.parametrize("name", [*read_costs(), "an unknown GPU"])
def test_a_longer_prefix_and_more_branches_are_shared_if_less_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mock_gpu(monkeypatch, properties(name))
    model = gpu_costs.gpu_costs(CUDA).cost_model(TOKEN_BYTES, torch.bfloat16)
    sizes = [1, 2, 3, 8, 16, 40, 64, 256, 1000]
    table = [[model.should_share(16 * pages, rows, rows) for rows in sizes] for pages in (1, 2, 5, 20, 64, 300, 4000)]
    for decisions in (*table, *zip(*table, strict=True)):
        assert list(decisions) == sorted(decisions)
    assert any(map(any, table))
    assert not all(row[1] for row in table)


def test_a_step_on_a_measured_gpu_has_its_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes, whole ones, are those that are read in the measured times."""
    mock_gpu(monkeypatch, properties("NVIDIA H200"))
    entry = read_costs()["NVIDIA H200"]
    cost = batch._create_cost_model(LAYER, torch.bfloat16, CUDA)
    assert cost.kv_bytes_per_token == TOKEN_BYTES
    rate = entry.read_gb_s["bfloat16"]
    assert cost.piece_cost_bytes == pytest.approx(entry.prefix_us * 1e-6 * rate * 1e9, abs=1)
    assert cost.query_cost_bytes == pytest.approx(entry.query_us * 1e-6 * rate * 1e9, abs=1)


def test_a_dtype_that_was_not_measured_counts_as_read_at_the_highest_rate() -> None:
    costs = GpuCosts(10, 1, {"bfloat16": 4000.0, "int8": 1500.0}, 132, "")
    assert costs.cost_model(1024, torch.int8).piece_cost_bytes == 15_000_000
    for dtype in (torch.float8_e4m3fn, INT4, torch.bfloat16):
        assert costs.cost_model(1024, dtype) == AttentionCostModel(1024, 40_000_000, 4_000_000)


def test_an_unknown_gpu_is_estimated_with_caution_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With half the multiprocessors and a quarter of the memory's rate of the reference."""
    mock_gpu(monkeypatch, properties("a new GPU"))
    reference = read_costs()[gpu_costs._REFERENCE]
    with caplog.at_level(logging.WARNING):
        found = gpu_costs.gpu_costs(CUDA)
        assert gpu_costs.gpu_costs(CUDA) is found
    [record] = caplog.records
    assert "a new GPU" in record.getMessage()
    assert "66 multiprocessors and 1229 GB/s" in record.getMessage()
    assert found.prefix_us >= 1.5 * reference.prefix_us
    assert found.query_us >= 2 * 1.5 * reference.query_us * 0.99
    as_large = gpu_costs.estimate_costs(reference, properties("as large", 132, 6144))
    estimated, measured = (costs.cost_model(TOKEN_BYTES, torch.bfloat16) for costs in (as_large, reference))
    for rows in (2, 4, 16, 64, 256):
        for tokens in range(16, 4096, 16):
            assert measured.should_share(tokens, rows, rows) or not estimated.should_share(tokens, rows, rows)


def test_costs_on_a_cpu_are_those_of_its_backends() -> None:
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.int8):
        cost = batch._create_cost_model(LAYER, dtype, cpu)
        assert cost == AttentionCostModel.for_compiled_kernel(cost.kv_bytes_per_token)
    other = LayerAttentionConfig(4, 2, 12, 0.3)  # a head dimension that the compiled kernel does not take
    assert batch._create_cost_model(other, torch.float32, cpu) == AttentionCostModel(2 * 2 * 12 * 4)
