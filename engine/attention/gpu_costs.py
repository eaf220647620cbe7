"""Costs of reading a shared prefix once on a GPU, measured on that model of GPU or estimated.

``gpu_costs.json`` has an entry for each GPU that was measured, by the name that torch gives it. ``python -m
benchmarks.gpu cascade`` measures the GPU at hand and writes its entry.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engine.attention.plan import AttentionCostModel

FILE = Path(__file__).with_name("gpu_costs.json")

_REFERENCE = "NVIDIA H200"
"""The GPU from whose entry the costs of GPUs without one are estimated."""
_CAUTION = 1.5
"""Factor of estimated costs: a prefix that every row reads for itself loses less than one shared too early."""
_READ_SHARE = 1.1
"""Estimated rate of reading, as a share of the memory's: rows that read the same keys find some of them in the cache.
The share of the reference is 1.06."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuCosts:
    """Times of a GPU's attention that decide from which length a shared prefix is read once."""

    prefix_us: float
    """Microseconds that a shared prefix takes however short it is."""
    query_us: float
    """Microseconds that each of its queries adds, whose results are merged."""
    read_gb_s: Mapping[str, float]
    """Rate at which rows read the same keys and values each for itself, by their torch dtype."""
    multiprocessors: int
    source: str
    """The measurement that the numbers were fitted to."""

    def cost_model(self, kv_bytes_per_token: int, dtype: torch.dtype) -> AttentionCostModel:
        """Return the cost model for keys and values of some size and dtype.

        A dtype that was not measured is read at the highest rate of those that were, so that it is shared later rather
        than too early.
        """
        rate = self.read_gb_s.get(dtype_name(dtype), max(self.read_gb_s.values()))
        prefix, query = (round(us * rate * 1e3) for us in (self.prefix_us, self.query_us))
        return AttentionCostModel(kv_bytes_per_token, piece_cost_bytes=prefix, query_cost_bytes=query)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in ``gpu_costs.json``."""
    return str(dtype).removeprefix("torch.")


def read_costs(path: Path = FILE) -> dict[str, GpuCosts]:
    """Return the measured costs by the name of the GPU."""
    return {name: GpuCosts(**entry) for name, entry in json.loads(path.read_text(encoding="utf-8")).items()}


@cache
def gpu_costs(device: torch.device) -> GpuCosts:
    """Return the costs of a CUDA device, estimated if its model was not measured."""
    properties = torch.cuda.get_device_properties(device)
    measured = read_costs()
    if properties.name in measured:
        return measured[properties.name]
    costs = estimate_costs(measured[_REFERENCE], properties)
    _log.warning(
        "The cost of shared prefixes was not measured on %s; estimated from its %d multiprocessors and %.0f GB/s. "
        "`python -m benchmarks.gpu cascade` measures it.",
        properties.name,
        properties.multi_processor_count,
        _memory_gb_s(properties),
    )
    return costs


def estimate_costs(reference: GpuCosts, properties: Any) -> GpuCosts:
    """Return cautious costs of a GPU with torch's device properties ``properties``, from those of another.

    The fixed time is one of launches and latencies, which differ little between GPUs; results are merged by all
    multiprocessors.
    """
    return GpuCosts(
        prefix_us=_CAUTION * reference.prefix_us,
        query_us=_CAUTION * reference.query_us * reference.multiprocessors / properties.multi_processor_count,
        read_gb_s={"bfloat16": _READ_SHARE * _memory_gb_s(properties)},
        multiprocessors=properties.multi_processor_count,
        source="estimated",
    )


def _memory_gb_s(properties: Any) -> float:
    """Return the rate of a GPU's memory, which moves two words in each cycle of its clock, in kHz."""
    return float(2 * properties.memory_clock_rate * properties.memory_bus_width / 8 / 1e6)
