"""Products with weight matrices, in the layout that is fastest on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from engine.device import CPU, DeviceConfig
from engine.protocol.types import EngineError
from engine.weights.matrix import Matrix, Multiply, QuantizedMatrix, dense, stack, to_floats
from kernels.common.quantization import Quantization, Rows
from kernels.cpu.linear.half import is_supported
from kernels.linear.embedding import Embedding, EmbeddingTable
from kernels.linear.fp32 import Linear, Product
from kernels.linear.half import HalfEmbedding, HalfLinear


def create_product(parts: Sequence[Matrix], bias: Tensor | None = None, device_config: DeviceConfig = CPU) -> Product:
    """Return the product with matrices of the same input, one below the other.

    On a CPU the layout is that of ``create_cpu_product`` if all parts can be fused and have one, else that of floats:
    in 16 bits if all of them are, and the processor widens them, else in float32. On a GPU
    weights are multiplied as they are stored, for activations in the config's dtype, and parts that can be fused are
    one launch; raises ``EngineError`` for parts that no kernel supports.
    """
    if device_config.uses_gpu_kernels:
        return _create_gpu_product(parts, bias, device_config)
    quantized = [part for part in parts if isinstance(part, QuantizedMatrix)]
    if quantized and _can_fuse(parts):
        product = quantized[0].create_cpu_product(quantized, bias)
        if product is not None:
            return product
    weight = stack([to_floats(part) for part in parts])
    return HalfLinear(weight, bias) if is_supported(weight.dtype) else Linear(weight.float(), bias)


def create_embedding(matrix: Matrix, device_config: DeviceConfig = CPU) -> Embedding:
    """Return the embedding table of a matrix, in the same layout as its product."""
    if not device_config.uses_gpu_kernels:
        if isinstance(matrix, Tensor):
            return HalfEmbedding(matrix) if is_supported(matrix.dtype) else EmbeddingTable(matrix.float())
        embedding = matrix.create_cpu_embedding()
        if embedding is not None:
            return embedding
    return EmbeddingTable(device_config.convert(dense(matrix)), is_batch_invariant=device_config.is_batch_invariant)


class QuantizedLinear:
    """``x @ weight.T + bias`` by a GPU's kernel for the weight's layout."""

    is_kernel = False

    def __init__(
        self,
        multiply: Multiply,
        parameters: int,
        bias: Tensor | None,
        *,
        quantization: Quantization | None,
        is_batch_invariant: bool,
    ) -> None:
        self.parameters, self.quantization, self.multiply, self.bias = parameters, quantization, multiply, bias
        self._is_batch_invariant = is_batch_invariant

    def __call__(self, x: Rows) -> Tensor:
        return self.multiply(x, self.bias, is_batch_invariant=self._is_batch_invariant)

    def to_float32(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias, dtype=torch.float32, is_batch_invariant=self._is_batch_invariant)

    def add(self, x: Rows, residual: Tensor) -> Tensor:
        return self(x).add_(residual)


class ConcatenatedProducts:
    """Several products of the same input, with their results side by side."""

    is_kernel = False

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = products
        quantizations = {product.quantization for product in products}
        self.quantization = quantizations.pop() if len(quantizations) == 1 else None
        self.parameters = sum(product.parameters for product in products)

    def __call__(self, x: Rows) -> Tensor:
        return torch.cat([product(x) for product in self.products], dim=1)

    def to_float32(self, x: Tensor) -> Tensor:
        return torch.cat([product.to_float32(x) for product in self.products], dim=1)

    def add(self, x: Rows, residual: Tensor) -> Tensor:
        return self(x).add_(residual)


def _create_gpu_product(parts: Sequence[Matrix], bias: Tensor | None, device_config: DeviceConfig) -> Product:
    parts = [part.to_gpu_matrix() if isinstance(part, QuantizedMatrix) else part for part in parts]
    for part in parts:
        if isinstance(part, QuantizedMatrix) and (missing := part.find_missing_kernel()):
            raise EngineError(f"no kernel of a GPU multiplies {missing}: quantize otherwise, or use --device cpu")
    if _can_fuse(parts):
        return _fuse(parts, bias, device_config)
    sizes = [part.shape[0] for part in parts]
    biases: Sequence[Tensor | None] = [None] * len(parts) if bias is None else torch.split(bias, sizes)
    return ConcatenatedProducts([_fuse([part], own, device_config) for part, own in zip(parts, biases, strict=True)])


def _can_fuse(parts: Sequence[Matrix]) -> bool:
    """Return True if one kernel takes all parts at once."""
    for above, below in pairwise(parts):
        if type(above) is not type(below):
            return False
        if isinstance(above, QuantizedMatrix) and isinstance(below, QuantizedMatrix) and not above.can_fuse(below):
            return False
    return True


def _fuse(parts: Sequence[Matrix], bias: Tensor | None, device_config: DeviceConfig) -> Product:
    """Return a GPU's product with parts that can be fused."""
    bias = None if bias is None else device_config.convert(bias)
    is_batch_invariant = device_config.is_batch_invariant
    quantized = [part for part in parts if isinstance(part, QuantizedMatrix)]
    if not quantized:
        weight = stack([device_config.convert(to_floats(part)) for part in parts])
        return Linear(weight, bias, is_batch_invariant=is_batch_invariant)
    multiply, quantization = quantized[0].create_gpu_multiply(quantized, device_config.device)
    parameters = sum(rows * columns for rows, columns in (part.shape for part in quantized))
    return QuantizedLinear(
        multiply,
        parameters + (0 if bias is None else bias.numel()),
        bias,
        quantization=quantization,
        is_batch_invariant=is_batch_invariant,
    )
