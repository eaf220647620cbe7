"""Examples of the OpenAPI document: recorded requests and answers of one job, one batch and one key.

``tests/api/app/test_openapi.py`` checks each of them against its schema.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_RECORDED: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))

PATH_PARAMETERS: dict[str, str] = _RECORDED["path_parameters"]
"""Values of path parameters by name."""
PROBLEM: dict[str, Any] = _RECORDED["problem"]
ANTHROPIC_ERROR: dict[str, Any] = _RECORDED["anthropic_error"]
OPENAI_ERROR: dict[str, Any] = _RECORDED["openai_error"]
BODIES: dict[str, dict[str, Any]] = _RECORDED["bodies"]
"""Request bodies by call, such as ``POST /v1/jobs``, for routes that declare none themselves."""
ANSWERS: dict[str, dict[str, Any]] = _RECORDED["answers"]
"""Responses by call and status."""
STREAMS: dict[str, str] = _RECORDED["streams"]
"""The first event of calls that also answer as a stream."""
