"""Feed-forward parts of a decoder layer: dense, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, overload

import torch
from torch import Tensor

from engine.device import DeviceConfig
from engine.models.routing import Router
from engine.weights.matmul import QuantizedLinear
from kernels.common.quantization import Quantization, QuantizedRows, Rows
from kernels.cpu.layers.experts import add_outputs, sort_by_expert
from kernels.cpu.linear.packed_weights import ExpertWeights, can_compute_together
from kernels.cpu.sampling.draft_chain import gather_rows
from kernels.layers.elementwise import add, contiguous
from kernels.layers.gate import sigmoid_mul
from kernels.linear.fp32 import Linear, Product, WeightProduct
from kernels.linear.nf4 import Nf4, Nf4Product, grouped_nf4_linear

_GROUPED_MAJORS = 9, 10
"""Major compute capabilities, Hopper's and Blackwell's, for which torch has a kernel of grouped products."""


class Activation(Protocol):
    """A function of ``kernels.layers.activation``."""

    @overload
    def __call__(self, gate_up: Tensor, /, quantization: None = None) -> Tensor: ...
    @overload
    def __call__(self, gate_up: Tensor, /, quantization: Quantization) -> QuantizedRows: ...


class FeedForward(Protocol):
    """A feed-forward part of a layer."""

    @property
    def products(self) -> tuple[Product, ...]: ...

    @property
    def quantization(self) -> Quantization | None:
        """The quantisation of its input."""
        ...

    @property
    def is_recordable(self) -> bool:
        """True if it only launches kernels that a ``KernelGraph`` records, if its products do."""
        ...

    def __call__(self, x: Rows) -> Tensor: ...
    def add(self, x: Rows, residual: Tensor) -> Tensor:
        """Return its result plus ``residual``."""
        ...


def has_grouped_products(device_config: DeviceConfig) -> bool:
    """Return True if grouped products of this dtype are one kernel on this device.

    Elsewhere torch computes them by a loop on the host, which waits for the sizes of the groups. False, too, if rows
    must not depend on each other: torch chooses the kernel by the number of rows.
    """
    if device_config.device.type != "cuda" or device_config.dtype != torch.bfloat16 or device_config.is_batch_invariant:
        return False
    return torch.cuda.get_device_capability(device_config.device)[0] in _GROUPED_MAJORS


class GatedMlp:
    """``down(activation(gate(x)) * up(x))``, with gate and up fused into one product.

    With an activation of ``[rows, n]`` to ``[rows, n]`` there is no gate: ``down(activation(up(x)))``.
    """

    is_recordable = True

    def __init__(self, gate_up: Product, down: Product, activation: Activation) -> None:
        """``gate_up``: ``[2 * intermediate, hidden]``, without a gate ``[intermediate, hidden]``. ``down``: ``[hidden,
        intermediate]``."""
        self.products = gate_up, down
        self.quantization = gate_up.quantization
        self.activation = activation
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Rows) -> Tensor:
        return self._down(self._activate(x))

    def add(self, x: Rows, residual: Tensor) -> Tensor:
        return self._down.add(self._activate(x), residual)

    def _activate(self, x: Rows) -> Rows:
        return self.activation(self._gate_up(x), self._down.quantization)


class GroupedLinear:
    """Products of rows that are sorted by expert with the floats of all experts, by a grouped product of torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """``weight``: ``[experts, out, in]``. ``bias``: ``[experts, out]``."""
        # A view: the product reads the matrices as they are, with the inputs of a row of weights side by side.
        self.num_experts, self._weight, self._bias = len(weight), weight.transpose(1, 2), bias

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        rows = torch._grouped_mm(x, self._weight, offs=ends)
        if self._bias is None:
            return rows
        index = torch.arange(len(rows), dtype=ends.dtype, device=ends.device)
        return rows.add_(self._bias[torch.searchsorted(ends, index, right=True)])


class GroupedNf4:
    """The same with weights of 16 levels, which a kernel multiplies by from their 4 bits."""

    def __init__(self, weight: Nf4, bias: Tensor | None, *, is_batch_invariant: bool) -> None:
        self.num_experts = len(weight.packed)
        self._weight, self._bias, self._is_batch_invariant = weight, bias, is_batch_invariant

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        return grouped_nf4_linear(x, self._weight, self._bias, ends, is_batch_invariant=self._is_batch_invariant)


class StackedExperts:
    """All experts' matrices, for one grouped product of each kind.

    The groups' boundaries stay on the device, so the host never waits for the router, and CUDA graphs can be captured.
    """

    def __init__(
        self, gate_up: GroupedLinear | GroupedNf4, down: GroupedLinear | GroupedNf4, activation: Activation
    ) -> None:
        self.num_experts = gate_up.num_experts
        self._gate_up, self._down, self._activation = gate_up, down, activation

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return the outputs ``[rows, hidden]`` of rows sorted by expert. ``ends``: the row after each expert's last
        one, int32 ``[experts]``."""
        return self._down(self._activation(self._gate_up(x, ends)), ends)


def stack_experts(pairs: Sequence[tuple[Product, Product]], activation: Activation) -> StackedExperts | None:
    """Return the experts with these products of gate and up, and of down, stacked; ``None`` if they are quantised."""
    gate_ups, downs = (_narrow_weights([pair[index] for pair in pairs]) for index in (0, 1))
    if gate_ups is None or downs is None:
        return None
    of_gate_up, of_down = (_stack_biases([pair[index] for pair in pairs]) for index in (0, 1))
    return StackedExperts(GroupedLinear(gate_ups, of_gate_up), GroupedLinear(downs, of_down), activation)


def stack_4_bit_experts(
    pairs: Sequence[tuple[Product, Product]], activation: Activation, *, is_batch_invariant: bool
) -> StackedExperts | None:
    """Return experts in 4-bit floats on a GPU, stacked; ``None`` if they have another layout."""
    products = [_stack_levels([pair[index] for pair in pairs], is_batch_invariant) for index in (0, 1)]
    gate_up, down = products
    return None if gate_up is None or down is None else StackedExperts(gate_up, down, activation)


def _stack_levels(products: Sequence[Product], is_batch_invariant: bool) -> GroupedNf4 | None:
    """Return products with weights of the same 16 levels, stacked; ``None`` if they have others."""
    own = [product for product in products if isinstance(product, QuantizedLinear)]
    weights = [product.multiply.weight for product in own if isinstance(product.multiply, Nf4Product)]
    if len(weights) < len(products) or any(weight.levels != weights[0].levels for weight in weights):
        return None
    if any(weight.scales.dtype != weights[0].scales.dtype for weight in weights):
        weights = [weight._replace(scales=weight.scales.float()) for weight in weights]
    weight = Nf4(
        torch.stack([weight.packed for weight in weights]),
        torch.stack([weight.scales for weight in weights]),
        weights[0].levels,
    )
    return GroupedNf4(weight, _stack_biases(products), is_batch_invariant=is_batch_invariant)


def _stack_biases(products: Sequence[Product]) -> Tensor | None:
    """Return the products' biases, stacked; ``None`` if they have none."""
    own = [product.bias for product in products if isinstance(product, Linear | QuantizedLinear)]
    biases = [bias for bias in own if bias is not None]
    return torch.stack(biases) if biases else None


def _narrow_weights(products: Sequence[Product]) -> Tensor | None:
    """Return the products' weights, stacked; ``None`` if they are quantised."""
    weights = [product.narrow_weight for product in products if isinstance(product, Linear)]
    narrow = [weight for weight in weights if weight is not None]
    return torch.stack(narrow) if len(narrow) == len(products) else None


class PackedExperts:
    """Experts whose products are two kernels for all of them, whatever tokens are routed to them."""

    def __init__(self, experts: Sequence[GatedMlp], gate_ups: ExpertWeights, downs: ExpertWeights) -> None:
        self._num_experts, self._activation = len(experts), experts[0].activation
        self._gate_ups, self._downs = gate_ups, downs

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor, residual: Tensor | None) -> Tensor:
        """Return the sums of the experts that a router has ``chosen``, plus ``residual``."""
        route = sort_by_expert(chosen, self._num_experts)
        gate_up = self._gate_ups.product(gather_rows(contiguous(x), route.tokens), route.ends)
        outputs = self._downs.product(self._activation(gate_up), route.ends)
        return add_outputs(outputs, weights, route.rows, None if residual is None else contiguous(residual))


def pack_experts(experts: Sequence[GatedMlp]) -> PackedExperts | None:
    """Return the experts as ``PackedExperts``; ``None`` if their layout has no kernel for it."""
    pairs: list[ExpertWeights] = []
    for part in range(2):
        products = [expert.products[part] for expert in experts]
        linear = [product for product in products if isinstance(product, WeightProduct)]
        weights = [product.packed for product in linear if product.packed is not None]
        if len(weights) < len(products) or not can_compute_together(weights):
            return None
        pairs.append(ExpertWeights(weights, [product.bias for product in linear]))
    return PackedExperts(experts, *pairs)


class Experts:
    """The weighted sum of the experts that a router chooses for each token.

    Tokens are sorted by expert, so that a step costs one product per expert that any token is routed to, or one grouped
    product if they are stacked.
    """

    quantization = None
    """None, as the router reads the inputs as they are."""

    def __init__(
        self,
        router: Router,
        experts: Sequence[GatedMlp] | StackedExperts,
        *,
        is_batch_invariant: bool = False,
        prepare: Callable[[Tensor], Tensor] | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """``is_batch_invariant``: add a token's outputs in an order that does not depend on the other tokens.
        ``prepare``: make the experts' inputs of the router's. ``finish``: make the result of the weighted sums.
        """
        self.is_stacked = isinstance(experts, StackedExperts)
        """True if the host need not wait for the router."""
        separate = () if isinstance(experts, StackedExperts) else experts
        self._packed = pack_experts(separate) if separate else None
        self.is_recordable = self._packed is not None and router.is_recordable and prepare is None and finish is None
        self.products = tuple(product for expert in separate for product in expert.products)
        self._router = router
        self._experts = experts
        self._per_token = router.config.per_token
        self._is_batch_invariant = is_batch_invariant
        self._prepare, self._finish = prepare, finish

    def __call__(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        total = self._add_experts(x, None)
        return total if self._finish is None else self._finish(total)

    def _add_experts(self, x: Tensor, residual: Tensor | None) -> Tensor:
        weights, chosen = self._router(x)
        if self._packed is not None:
            return self._packed(x if self._prepare is None else self._prepare(x), weights, chosen, residual)
        total = self._add_separately(x, weights, chosen)
        return total if residual is None else add(residual, total)

    def _add_separately(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        chosen = chosen.flatten()
        order = chosen.argsort(stable=True)
        inputs = (x if self._prepare is None else self._prepare(x))[order // self._per_token]
        if isinstance(self._experts, StackedExperts):
            indices = torch.arange(self._experts.num_experts, device=x.device)
            ends = torch.searchsorted(chosen[order], indices, right=True, out_int32=True)
            sorted_outputs = self._experts(inputs, ends)
        else:
            rows = torch.split(inputs, chosen.bincount(minlength=len(self._experts)).tolist())
            pairs = zip(self._experts, rows, strict=True)
            sorted_outputs = torch.cat([expert(own) for expert, own in pairs if len(own)])
        outputs = torch.empty_like(sorted_outputs)
        outputs[order] = sorted_outputs
        parts, weights = outputs.view(len(x), self._per_token, -1), weights.to(outputs.dtype)
        if not self._is_batch_invariant:
            return (weights[:, None] @ parts).squeeze(1)
        total = weights[:, :1] * parts[:, 0]
        for index in range(1, self._per_token):
            total += weights[:, index, None] * parts[:, index]
        return total

    def add(self, x: Rows, residual: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        return self._add_experts(x, residual) if self._finish is None else add(residual, self(x))


class SharedExperts:
    """Experts, and one more that every token is routed to, weighted by a gate of its own if there is one."""

    quantization = None

    def __init__(self, experts: Experts, shared: GatedMlp, gate: Product | None) -> None:
        """``gate``: ``[1, hidden]``."""
        self.products = (*experts.products, *shared.products)
        self.is_stacked = experts.is_stacked
        self.is_recordable = experts.is_recordable and (gate is None or gate.is_kernel)
        self._experts, self._shared, self._gate = experts, shared, gate

    def __call__(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        shared = self._shared(x)
        return add(self._experts(x), shared if self._gate is None else sigmoid_mul(self._gate(x), shared))

    def add(self, x: Rows, residual: Tensor) -> Tensor:
        return add(residual, self(x))


def can_capture(part: FeedForward) -> bool:
    """Return True if the host waits for nothing in a feed-forward part."""
    return isinstance(part, GatedMlp) or (isinstance(part, Experts | SharedExperts) and part.is_stacked)
