"""The reference of the Prometheus metrics, from the expositions of the API and of the engine."""

from __future__ import annotations

import re

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from docs.generate.tables import code, table


def section(title: str, exposition: str) -> str:
    """Return a table of the metrics that a scrape shows. Python's own (``python_*``, ``process_*``) are left out."""
    text = re.sub(r"^#.*_created.*\n|^\w+_created.*\n", "", exposition, flags=re.MULTILINE)
    rows = [
        (code(_name(metric)), metric.type, metric.documentation)
        for metric in text_string_to_metric_families(text)
        if metric.name.startswith("reasoner")
    ]
    return f"## {title}\n\n{table(('metric', 'type', ''), rows)}"


def _name(metric: Metric) -> str:
    return metric.name + ("_total" if metric.type == "counter" else "")
