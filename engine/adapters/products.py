"""Products with the updates of several adapters, each row its own.

The product with the base's weights stays as it is, in any format (QLoRA: Dettmers et al., 2023, section 3): a row
without an adapter keeps its bits, and a step without adapters launches what it would without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.adapters.checkpoint import Adapter
from engine.device import CPU, DeviceConfig
from engine.protocol.types import EngineError
from kernels.common.quantization import Rows
from kernels.linear.fp32 import Product
from kernels.linear.low_rank import LowRankUpdate, LowRankUpdates

MAX_ADAPTERS = 32
_ADAPTED = "model.layers."
"""Beginning of the names of modules that can be adapted."""
_NOT_ADAPTED = ".experts."
"""Part of the names of those that cannot: their products are computed together."""


@dataclass(slots=True)
class AdapterRows:
    """The adapters of the rows of the step that is computed."""

    indices: Tensor | None = None
    """int64 ``[rows or more]`` on the device; ``None`` if no row has an adapter."""


class AdaptedProduct:
    """A product with the base's weights, and the updates of each row's adapter."""

    def __init__(self, base: Product, updates: LowRankUpdates, rows: AdapterRows) -> None:
        self.base, self._updates, self._rows = base, updates, rows
        self.parameters = base.parameters
        self.quantization = base.quantization
        self.is_kernel = base.is_kernel and updates.is_kernel

    def __call__(self, x: Rows) -> Tensor:
        return self._update(x, self.base(x))

    def add(self, x: Rows, residual: Tensor) -> Tensor:
        return self._update(x, self.base.add(x, residual))

    def to_float32(self, x: Tensor) -> Tensor:
        return self._update(x, self.base.to_float32(x))

    def _update(self, x: Rows, out: Tensor) -> Tensor:
        indices = self._rows.indices
        return out if indices is None else self._updates.add(x, out, indices)


class AdapterSet:
    """The adapters of one model, by their indices."""

    def __init__(self, adapters: Sequence[Adapter], device_config: DeviceConfig = CPU) -> None:
        if len(adapters) > MAX_ADAPTERS:
            raise EngineError(f"{len(adapters)} adapters are given; at most {MAX_ADAPTERS} are served at once")
        self.adapters = adapters
        self.rows = AdapterRows()
        self._device_config = device_config

    def adapt(self, product: Product, parts: Mapping[str, int], columns: int) -> Product:
        """Return a product with the adapters' updates; the same one if they have none.

        ``parts``: the modules that it fuses, by name, and their numbers of rows. Raises ``EngineError`` if matrices are
        missing or do not fit.
        """
        first, updates = 0, list[LowRankUpdate]()
        for module, num_rows in parts.items():
            if module.startswith(_ADAPTED) and _NOT_ADAPTED not in module:
                for index, adapter in enumerate(self.adapters):
                    factors = adapter.take(module, num_rows, columns)
                    if factors is not None:
                        updates.append(LowRankUpdate(index, first, factors.down, factors.up))
            first += num_rows
        if not updates:
            return product
        device_config = self._device_config
        matrices = LowRankUpdates(
            updates,
            first,
            device=device_config.device,
            dtype=device_config.dtype,
            is_kernel=not device_config.uses_gpu_kernels,
            is_batch_invariant=device_config.is_batch_invariant,
        )
        return AdaptedProduct(product, matrices, self.rows)

    def finish(self) -> None:
        """Raise ``EngineError`` if an adapter changes modules that no product has."""
        for adapter in self.adapters:
            adapter.finish()


def get_base(product: Product) -> Product:
    """Return a product without the updates of adapters."""
    return product.base if isinstance(product, AdaptedProduct) else product
