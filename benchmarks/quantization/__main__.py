"""``python -m benchmarks.quantization``: the process that computes ``reasoner quantize --report``.

Its argument is a JSON object with ``out``, a folder for the results or null, and optionally the fields of
``report.Size``. It writes JSON lines: ``{"done", "total", "next"}`` for progress, and ``{"result": document}`` at the
end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import reasoner
from benchmarks.quantization.report import Size, document, draw, markdown, measure

_FOLDER = Path(reasoner.__file__).parent / "bundled" / "policy"


def main() -> None:
    """Run the measurement, and write results.json, table.md and chart.png."""
    asked = json.loads(sys.argv[1])
    out, size = asked.pop("out"), Size(**asked)
    rows, lengths = measure(_FOLDER, size, _tell)
    told = document(rows, size, lengths)
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(told, indent=2) + "\n")
        (folder / "table.md").write_text(markdown(rows))
        draw(rows, folder / "chart.png")
    print(json.dumps({"result": told}), flush=True)


def _tell(done: int, total: int, following: str) -> None:
    print(json.dumps({"done": done, "total": total, "next": following}), flush=True)


if __name__ == "__main__":
    main()
