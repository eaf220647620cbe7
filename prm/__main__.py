"""``python -m prm``: the process of ``reasoner prm train``.

Its argument is a JSON object of ``TrainPlan``'s fields, of ``ProbePlan``'s and ``"probe": true``, or of
``AdapterPlan``'s and ``"adapter": true``. It writes JSON lines: ``{"done", "total", "next"}`` as progress, then
``{"result"}``, or ``{"error", "usage"}`` with exit status 1 on failure (``usage`` is true if the request was invalid).
SIGTERM ends it after the current step, with a checkpoint of a PRM or an adapter.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from dataclasses import asdict

from engine.threads import short_waits  # noqa: F401 - it has to come before torch

# isort: split
import torch

from engine.protocol.types import EngineError
from engine.threads.processors import choose_threads
from prm.records import BadRecord
from prm.training.adapter import AdapterPlan, train_adapter
from prm.training.loop import Trained
from prm.training.probe import ProbePlan, TrainedProbe, train_probe
from prm.training.train import TrainPlan, train


def main() -> int:
    stopped = threading.Event()
    torch.set_num_threads(choose_threads().number)
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        request = json.loads(sys.argv[1])
        trained: Trained | TrainedProbe | None
        if request.pop("probe", False):
            trained = train_probe(ProbePlan(**request), _report_progress, stopped.is_set)
        elif request.pop("adapter", False):
            trained = train_adapter(AdapterPlan(**request), _report_progress, stopped.is_set)
        else:
            trained = train(TrainPlan(**request), _report_progress, stopped.is_set)
    except (BadRecord, EngineError) as error:
        print(json.dumps({"error": str(error), "usage": isinstance(error, BadRecord)}), flush=True)
        return 1
    if trained is not None:
        print(json.dumps({"result": asdict(trained)}), flush=True)
    return 0


def _report_progress(done: int, total: int, next_part: str) -> None:
    print(json.dumps({"done": done, "total": total, "next": next_part}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
