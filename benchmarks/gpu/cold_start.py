"""Time the first steps of an engine on a GPU: ``python -m benchmarks.gpu.cold_start --cache FOLDER``.

A first token pays for Triton's compilations unless its cache has them; the first steps of each shape pay for the
capture of graphs. Four layers of the shapes in ``benchmarks.gpu.decode``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path


def main() -> int:
    """Print the seconds of each part; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.cold_start", description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder of Triton's compiled kernels")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on whatever device there is")
    arguments = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = str(arguments.cache.resolve())  # read when Triton is imported
    start = time.perf_counter()
    import torch

    from benchmarks.gpu import decode
    from benchmarks.kernels.dry_run import TINY_MODEL
    from benchmarks.kernels.step import SIZES, read_whole
    from engine.core.engine_core import EngineCore
    from engine.protocol.options import EngineOptions

    imported = time.perf_counter()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(decode.random_weights(read_whole))
        if not torch.cuda.is_available():
            stack.enter_context(decode.emulated_gpu())
        decode.write_checkpoint(Path(folder), TINY_MODEL if arguments.tiny else SIZES)
        core = EngineCore("m", Path(folder), EngineOptions(kv_tokens=8192 if arguments.tiny else None))
        decode.synchronize()
        loaded = time.perf_counter()
        decode.submit(core, decode.Work(batch=8, context=256))
        steps = [decode.time_step(core) for _ in range(64)]
    print(f"imports {imported - start:.1f} s, load {loaded - imported:.1f} s, first step {steps[0] / 1e3:.1f} s")
    print(
        "steps of more than 50 ms: " + ", ".join(f"{index}: {ms:.0f} ms" for index, ms in enumerate(steps) if ms > 50)
    )
    print(f"median of the last 32 steps {sorted(steps[32:])[16]:.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
