"""Weight matrices: tensors of floats, or what a quantised checkpoint holds.

A class in ``engine.weights.matrices`` has the weights of one layout, says which of them one kernel takes at once, and
makes the products that compute with them. ``engine.weights.matmul`` knows the interface below alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from kernels.common.quantization import Quantization
from kernels.linear.embedding import Embedding
from kernels.linear.fp32 import Product

MATRIX_DEPTH = 16
"""Inputs that a GPU's matrix instruction takes at once."""
MATRIX_DEPTH_8BIT = 32
"""Inputs that it takes at once where weights and activations both have 8 bits."""


class Multiply(Protocol):
    """A function that multiplies by a quantized weight ``[out, in]``."""

    def __call__(
        self, x: Any, bias: Tensor | None, *, dtype: torch.dtype | None = None, is_batch_invariant: bool = False
    ) -> Tensor:
        """Return ``[rows, out]`` in ``dtype`` for ``x`` ``[rows, in]``; ``None``: in that of ``x``.

        ``x``: a tensor, or ``QuantizedRows`` if the function quantizes its inputs.

        ``is_batch_invariant``: no row depends, to the bit, on the others.
        """
        ...


class QuantizedMatrix(ABC):
    """A weight matrix ``[out, in]`` in one of the layouts of quantised checkpoints."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the weights, float32 ``[out, in]``."""

    def can_fuse(self, below: Self) -> bool:  # noqa: ARG002
        """Return True if one kernel multiplies by this matrix and by another of the same input, placed below it."""
        return True

    @classmethod
    def create_cpu_product(cls, parts: Sequence[Self], bias: Tensor | None) -> Product | None:  # noqa: ARG003
        """Return the product with parts that can be fused, or ``None`` if float32 weights are as fast on this CPU."""
        return None

    def create_cpu_embedding(self) -> Embedding | None:
        """Return the embedding table, or ``None`` if it is kept in float32."""
        return None

    def to_gpu_matrix(self) -> QuantizedMatrix | Tensor:
        """Return the matrix by which a GPU multiplies: this one, or an equal one in a layout that has a kernel."""
        return self

    def find_missing_kernel(self) -> str | None:
        """Return a description of weights that no kernel of a GPU supports; ``None`` if one does."""
        return None

    @classmethod
    def create_gpu_multiply(cls, parts: Sequence[Self], device: torch.device) -> tuple[Multiply, Quantization | None]:
        """Copy parts that can be fused to a GPU; return the product with them and how it quantizes its inputs.

        Not called for a layout without a kernel, whose ``to_gpu_matrix`` returns another one.
        """
        raise NotImplementedError(cls.__name__)


Matrix = Tensor | QuantizedMatrix
"""A quantised matrix, or weights ``[out, in]`` in float32, float16 or bfloat16."""


def dense(matrix: Matrix) -> Tensor:
    """Return the weights, float32 ``[out, in]``."""
    return to_floats(matrix).float()


def to_floats(matrix: Matrix) -> Tensor:
    """Return the weights as floats ``[out, in]``, of those dtypes that a ``Matrix`` may have."""
    return matrix if isinstance(matrix, Tensor) else matrix.dense()


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the first axis."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
