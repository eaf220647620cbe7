"""``python -m engine.quantization``: the process in which ``reasoner quantize`` computes.

Its argument is a JSON object of ``model``, ``out``, ``method``, ``bits``, ``group_size`` and ``calibration``. It writes
JSON lines: ``{"done", "total", "next"}`` as it goes, ``{"error"}`` with exit status 1 when it cannot, with
``"usage": true`` where what was asked for is wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engine.threads import short_waits  # noqa: F401 - it has to come before torch

# isort: split
import torch

from engine.protocol.types import EngineError
from engine.quantization.options import options
from engine.quantization.quantize import quantize
from engine.threads.processors import choose_threads


def main() -> int:
    """Returns the exit status."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(choose_threads().number)
    calibration = None if asked["calibration"] is None else Path(asked["calibration"])
    try:
        chosen = options(asked["method"], asked["bits"], asked["group_size"], calibration)
        quantize(Path(asked["model"]), Path(asked["out"]), chosen, _tell)
    except EngineError as error:  # the model, the folder or an option
        print(json.dumps({"error": str(error), "usage": True}), flush=True)
        return 1
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    return 0


def _tell(done: int, total: int, following: str) -> None:
    print(json.dumps({"done": done, "total": total, "next": following}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
