"""The product with a weight matrix, in the form that is fastest on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.device import CPU, DeviceConfig
from engine.weights.gpu_matmul import gpu_product
from engine.weights.matrix import GroupedMatrix, Int8Matrix, Matrix, alike, dense, stack
from kernels.linear import int4, int8
from kernels.linear.fp32 import Linear, Product
from kernels.linear.int4 import Int4Linear
from kernels.linear.int8 import Int8Linear


def product(parts: Sequence[Matrix], bias: Tensor | None = None, device_config: DeviceConfig = CPU) -> Product:
    """The product with matrices of the same input, one below the other. On a GPU see ``gpu.gpu_product``; on a CPU in
    the layout that is fastest there:

    - W8A8 in every part: int8, which wins for every shape and number of rows.
    - 4 bits in groups of the same size: int4, an eighth of the memory. It rounds the activations too, but far more
      finely than the checkpoint rounded the weights.
    - Anything else: float32. Nothing beats it there without rounding activations as coarsely as the weights.
    """
    if device_config.uses_gpu_kernels:
        return gpu_product(parts, bias, device_config)
    first = parts[0]
    if isinstance(first, Int8Matrix) and int8.supported(first.codes.shape[1]):
        ints = [part for part in parts if isinstance(part, Int8Matrix)]
        if len(ints) == len(parts):
            return Int8Linear(stack([part.codes for part in ints]), stack([part.scales for part in ints]), bias)
    if isinstance(first, GroupedMatrix) and _packable(first):
        grouped = [part for part in parts if isinstance(part, GroupedMatrix) and alike(part, first)]
        if len(grouped) == len(parts):
            codes, order = stack([part.codes for part in grouped]), None
            if first.group_of is not None:
                order = first.group_of.argsort(stable=True)
                codes = codes[:, order]
            scales, zeros = stack([part.scales for part in grouped]), stack([part.zeros for part in grouped])
            return Int4Linear(codes, scales, zeros, bias, order)
    return Linear(stack([dense(part) for part in parts]), bias)


def _packable(matrix: GroupedMatrix) -> bool:
    columns, groups = matrix.codes.shape[1], matrix.scales.shape[1]
    size = columns // groups
    equal = matrix.group_of is None or bool((matrix.group_of.bincount(minlength=groups) == size).all())
    return matrix.bits == 4 and equal and int4.supported(columns, groups)
