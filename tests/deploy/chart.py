"""The chart as Helm renders it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.tools import ROOT, find_tool

CHART = ROOT / "deploy" / "helm" / "reasoner"
SECRETS = {"apiKeys": "k" * 32, "redisApiPassword": "a" * 32, "redisWorkerPassword": "w" * 32}


@dataclass(frozen=True)
class Rendered:
    """The objects of a release in the namespace ``prod``, what is invalid about them, and Helm's refusal."""

    manifests: list[dict[str, Any]]
    invalid: list[Any]
    error: str | None

    def find(self, kind: str, name: str) -> dict[str, Any]:
        (found,) = (one for one in self.of_kind(kind) if one["metadata"]["name"] == name)
        return found

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [one for one in self.manifests if one["kind"] in kinds]

    def pods(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and template of each set of pods that runs for long."""
        for one in self.of_kind("Deployment", "StatefulSet"):
            yield one["metadata"]["name"], one["spec"]["template"]


def render(**values: Any) -> Rendered:
    """Render the chart with these values besides secrets."""
    python = find_tool("python")
    program = Path(__file__).with_name("render_chart.py")
    text = json.dumps({"secrets": SECRETS} | values)
    run = subprocess.run(
        [python, str(program), str(CHART)], input=text, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return Rendered(**json.loads(run.stdout))


def find_scaling_query(pool: str) -> str:
    """Return the query by which KEDA scales a pool of workers."""
    scaling = {"enabled": True, "prometheus": "http://prometheus:9090"}
    scaled = render(autoscaling=scaling).find("ScaledObject", f"reasoner-worker-{pool}")
    return str(scaled["spec"]["triggers"][0]["metadata"]["query"])
