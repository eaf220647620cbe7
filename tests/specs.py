"""Jobs for tests: made as a program makes them, but asked the bare question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reasoner.admission.check import check_spec
from reasoner.admission.sources import SOURCES, Submission, merge_sources
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import JobSpec

_SOURCES = [source for source in SOURCES if source.name != "instruction"]


def build_spec(fields: Mapping[str, Any] | None = None, /, **more: Any) -> JobSpec:
    """Return the job of a request, whose seed is 0 if it names none. Raises ``JobRefused`` for contradictions."""
    request = JobRequest.model_validate({"seed": 0, **(fields or {}), **more})
    merged = merge_sources(Submission.to_program(request, {}), _SOURCES)
    check_spec(merged)
    return merged.spec
