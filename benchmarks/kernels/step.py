"""A whole decoding step of the engine's model on a GPU, compared with the time to read and write its bytes.

A few layers of an 8B model with random weights: many times the second-level cache, and quickly made. All kernels are
launched by a graph, as in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.measure import Case, Runs
from engine.attention.cuda_triton import TritonAttention
from engine.attention.plan import AttentionCostModel, AttentionMetadata
from engine.device import DeviceConfig
from engine.models.config import RawConfig
from engine.models.decoder import Decoder
from engine.models.families.config import DecoderConfig
from engine.models.families.read import decoder_config
from engine.models.interface import Batch
from engine.weights.formats.registry import MatrixReader
from engine.weights.matrices.float8 import Float8Matrix
from engine.weights.matrices.grouped import GroupedMatrix
from engine.weights.matrix import Matrix, dense
from engine.weights.safetensors import Weights

SIZES = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_PAGE, GROUP = 16, 128


def cases(batches: tuple[int, ...] = (1, 16, 64), context: int = 4096, sizes: dict[str, int] = SIZES) -> Iterator[Case]:
    """Yield steps of some numbers of sequences of ``context`` tokens, with 16-bit and 4-bit weights."""
    fields = sizes | {"max_position_embeddings": context, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
    config = decoder_config(RawConfig(Path(), {"architectures": ["LlamaForCausalLM"], **fields}, {}))
    query, key = config.heads * config.head_dim, 2 * config.kv_heads * config.head_dim
    layer = config.hidden_size * (2 * query + key + 3 * config.intermediate)
    for name, bits, read in (("bfloat16", 16.0, read_whole), ("int4", 4 + 24 / GROUP, read_int4)):
        for rows in batches:
            keys = 2 * rows * context * key * config.num_layers
            moved = config.num_layers * layer * bits / 8 + 2 * config.vocab_size * config.hidden_size + keys
            build = partial(_runs, config=config, rows=rows, context=context, read=read)
            yield Case(f"step with {name} weights, {rows} × {context}", int(moved), build)


def _runs(device: torch.device, config: DecoderConfig, rows: int, context: int, read: MatrixReader) -> Runs:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pages = np.random.default_rng(0).permutation(rows * context // _PAGE).reshape(rows, -1)
    shape = config.num_layers, 2, config.kv_heads, pages.size, _PAGE, config.head_dim
    keys = torch.randn(shape, device=device, dtype=dtype)
    tokens = torch.randint(0, config.vocab_size, (rows,), device=device)
    ours = _step(DeviceConfig(device, dtype, uses_gpu_kernels=True), config, read, tokens, pages, keys)

    def expected() -> Tensor:
        wide = DeviceConfig(device, torch.float32, uses_gpu_kernels=True)
        return _step(wide, config, _widened(read), tokens, pages, keys.float())()

    return Runs(ours, {}, expected, 0.1)


def _step(
    device_config: DeviceConfig,
    config: DecoderConfig,
    read: MatrixReader,
    tokens: Tensor,
    pages: np.ndarray,
    keys: Tensor,
) -> Callable[[], Tensor]:
    """Return a function that computes the logits of a step in which every sequence computes its last token."""
    count, context = len(pages), pages.shape[1] * _PAGE
    model = Decoder(config, RandomWeights(device_config.device), context, read, device_config)
    attend = TritonAttention(config.attention, keys)
    cost = AttentionCostModel(2 * config.kv_heads * config.head_dim * keys.element_size())
    per_kv = config.heads // config.kv_heads
    lengths = np.ones(count, np.int64), np.full(count, context)
    attend.prepare(AttentionMetadata(pages, *lengths, _PAGE, pages.size, config.kv_heads, per_kv, cost))
    batch = Batch(tokens, torch.full_like(tokens, context - 1))
    return lambda: model.compute_logits(model.forward(batch, attend))


class RandomWeights(Weights):
    """Random tensors of any name and shape, the same for the same name."""

    def __init__(self, device: torch.device) -> None:
        self.parameters, self._files = 0, {}
        self._device = device

    def take_floats(self, name: str, *shape: int) -> Tensor:
        """Return a random tensor, scaled so that a product is about as large as its input."""
        self.count(int(np.prod(shape)))
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        return torch.randn(shape, device=self._device, generator=self.dice(name)).mul_(shape[-1] ** -0.5)

    def dice(self, name: str) -> torch.Generator:
        """Return the random generator of a tensor."""
        return torch.Generator(self._device).manual_seed(crc32(name.encode()))


def read_whole(weights: Weights, name: str, rows: int, columns: int) -> Matrix:
    return weights.take(f"{name}.weight", rows, columns)


def read_int4(weights: Weights, name: str, rows: int, columns: int) -> Matrix:
    if name == "lm_head":  # modules that formats do not quantize
        return read_whole(weights, name, rows, columns)
    assert isinstance(weights, RandomWeights)
    dice = weights.dice(name)
    codes = torch.randint(0, 16, (rows, columns), device=dice.device, generator=dice, dtype=torch.uint8)
    scales = (torch.rand(rows, columns // GROUP, device=dice.device, generator=dice) + 0.5) * 0.2 * columns**-0.5
    return GroupedMatrix(codes, scales.half().float(), torch.full_like(scales, 8), 4)


def read_fp8(weights: Weights, name: str, rows: int, columns: int) -> Matrix:
    """Read float8 with a scale for each output, whose product rounds each row of activations, too."""
    if name == "lm_head":
        return read_whole(weights, name, rows, columns)
    assert isinstance(weights, RandomWeights)
    dice = weights.dice(name)
    codes = torch.randn(rows, columns, device=dice.device, generator=dice).mul_(64).to(torch.float8_e4m3fn)
    scales = (torch.rand(rows, 1, device=dice.device, generator=dice) + 0.5) / 64 * columns**-0.5
    return Float8Matrix(codes, scales, (1, columns), rounds_activations=True)


def _widened(read: MatrixReader) -> MatrixReader:
    return lambda weights, name, rows, columns: dense(read(weights, name, rows, columns))
