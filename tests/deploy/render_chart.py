"""Program of the environment with Helm: ``python render_chart.py CHART`` renders a chart with values from stdin (JSON).

Prints a JSON object: ``manifests``, ``invalid`` (what schemas of Kubernetes and its operators say against them), and
``error``, if Helm refuses the values.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from helm_python import HelmError
from helm_python.chart import Chart, lint

CUSTOM = {
    "ScaledObject": "cloudcoil.models.keda.v1alpha1",
    "ServiceMonitor": "cloudcoil.models.prometheus_operator.v1",
    "PrometheusRule": "cloudcoil.models.prometheus_operator.v1",
}
"""Modules with a model of operators' objects, whose import takes seconds."""
VERSIONS = ("1.27.0", "1.37.0")
"""The oldest Kubernetes that the chart admits, and the newest whose schemas there are."""


def close(schema: Any) -> Any:
    """Refuse unknown fields wherever the schema names some, as servers do with field validation."""
    if isinstance(schema, list):
        return [close(part) for part in schema]
    if isinstance(schema, str):
        return schema.replace("^(?i)", "(?i)^")  # Go's regular expressions take flags anywhere
    if not isinstance(schema, dict):
        return schema
    closed = {key: close(part) for key, part in schema.items()}
    return closed | {"additionalProperties": False} if "properties" in schema else closed


def find_faults(manifest: dict[str, Any]) -> list[str]:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    try:
        if kind in CUSTOM:
            model = getattr(importlib.import_module(CUSTOM[kind]), kind)
            jsonschema.validate(manifest, close(model.model_json_schema()))
        else:
            for version in VERSIONS:
                kubernetes_validate.validate(manifest, version, strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        return [f"{kind} {name}: {error}"]
    return []


def main() -> None:
    chart, values = sys.argv[1], json.load(sys.stdin)
    answer: dict[str, Any] = {"manifests": [], "invalid": [], "error": None}
    try:
        report = lint(chart, values, strict=True)
        answer["invalid"] += [message for message in report["messages"] if message["severity"] > 1]
        with Chart.load(chart) as loaded:
            rendered = loaded.render(values, name="reasoner", namespace="prod")
    except HelmError as error:
        answer["error"] = str(error)
    else:
        texts = [text for name, text in rendered.items() if name.endswith(".yaml")]
        answer["manifests"] = [part for text in texts for part in yaml.safe_load_all(text) if part]
        answer["invalid"] += [fault for manifest in answer["manifests"] for fault in find_faults(manifest)]
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
