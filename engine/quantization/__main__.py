"""``python -m engine.quantization``: the process in which ``reasoner quantize`` computes.

Its argument is a JSON object with ``model``, ``out``, ``method``, ``bits``, ``group_size`` and ``calibration``. It
writes JSON lines: ``{"done", "total", "next"}`` for each part, or ``{"error"}`` with exit status 1, and with
``"usage": true`` if the request is at fault.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engine.threads import short_waits  # noqa: F401 - must be imported before torch

# isort: split
import torch

from engine.protocol.types import EngineError
from engine.quantization.options import create_options
from engine.quantization.quantize import quantize
from engine.threads.processors import choose_threads


def main() -> int:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(choose_threads().number)
    calibration = None if request["calibration"] is None else Path(request["calibration"])
    try:
        chosen = create_options(request["method"], request["bits"], request["group_size"], calibration)
        quantize(Path(request["model"]), Path(request["out"]), chosen, _report_progress)
    except EngineError as error:  # the model, the folder or an option
        print(json.dumps({"error": str(error), "usage": True}), flush=True)
        return 1
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    return 0


def _report_progress(done: int, total: int, next_part: str) -> None:
    print(json.dumps({"done": done, "total": total, "next": next_part}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
