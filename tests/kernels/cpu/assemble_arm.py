"""The assembly of products of bytes for ARM, as JSON, on any processor: run with the variables of ``ENVIRONMENT``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir

from kernels.cpu.linear import int4, int8
from kernels.cpu.linear.ggml.formats import FORMATS
from kernels.cpu.linear.ggml.tile import BlockTile
from kernels.cpu.simd.llvm_ir import I64

ENVIRONMENT = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+dotprod"}
"""Settings of numba that stand for an ARM processor with ``sdot``."""
ROWS = 2
"""Rows of the products."""


def assemble(target: Any, generate: Callable[..., None]) -> str:
    """Return the assembly of one tile; ``generate`` is called as ``product_body`` does it."""
    module = ir.Module()
    module.triple, module.data_layout = target.triple, str(target.target_data)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 9), "multiply")
    builder = ir.IRBuilder(function.append_basic_block())
    generate(builder, ROWS, function.args[:4], *function.args[4:7], function.args[7:])
    builder.ret_void()
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    assembly: str = target.emit_assembly(parsed)
    return assembly


def assemble_all() -> dict[str, str]:
    """Return the assembly by the names of types of weights and of block formats."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(
        cpu=ENVIRONMENT["NUMBA_CPU_NAME"], features=ENVIRONMENT["NUMBA_CPU_FEATURES"], opt=3
    )
    tiles: dict[str, Any] = {"int8": int8._generate_tile, "int4": int4._generate_tile}
    tiles |= {name: BlockTile(block_format) for name, block_format in FORMATS.items()}
    return {name: assemble(target, tile) for name, tile in tiles.items()}


if __name__ == "__main__":
    print(json.dumps(assemble_all()))
