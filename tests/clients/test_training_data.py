"""Exported rows in the hands of those for whom they are: TRL's trainers, and verl's types."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from reasoner.client import Client
from tests.vllm.servers import ROOT, Service

ENVIRONMENT = ROOT / os.environ.get("TRAINING_ENVIRONMENT", "build/training")
SECONDS = 280.0
PROBLEMS = (
    "Reach 10 from 9, 5 and 6: use each number exactly once, with + - * /.",
    "Use the numbers 12, 12 and 6, each exactly once, with + - * / to reach 60.",
)
FORMATS = ("sft", "preference", "unpaired", "rollouts")


def test_trl_trains_on_the_rows_and_verl_takes_the_rollouts(service: Service, tmp_path: Path) -> None:
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.skip("the readers are not installed: run make test-training")
    search = {"model": "policy", "strategy": {"name": "best_of_n", "n": 16}, "seed": 0, "record_logprobs": True}
    counts = {}
    with Client(service.url) as client:
        for job in [client.submit({"problem": problem, **search}) for problem in PROBLEMS]:
            client.wait(job.id)
        for name in FORMATS:
            lines = [*client.export(format=name)]
            (tmp_path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
            counts[name] = len(lines)
    script = Path(__file__).parent / "training" / "read_rows.py"
    command = [str(ENVIRONMENT / "bin" / "python"), str(script), str(tmp_path), str(ROOT / "reasoner/bundled/policy")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    assert json.loads(ended.stdout.splitlines()[-1]) == counts
