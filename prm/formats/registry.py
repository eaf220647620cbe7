"""Registry of formats of process reward models, and detection of a checkpoint's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from engine.protocol.types import EngineClient, EngineError, ModelInfo
from prm.formats.base import Format
from prm.formats.math_shepherd import MathShepherd
from prm.formats.qwen_math import QwenMath
from prm.formats.rlhflow import RLHFlow
from prm.formats.skywork import Skywork
from prm.formats.token_classification import TokenClassification

FORMATS: Mapping[str, type[Format]] = {
    format.name: format for format in (TokenClassification, QwenMath, Skywork, MathShepherd, RLHFlow)
}
FormatName = Literal["token_classification", "qwen_math", "skywork", "math_shepherd", "rlhflow"]
"""Names of the formats, for settings."""
FORMAT_NOTE = "reasoner_prm_format"
"""Key of ``ModelInfo.extra`` for the format that the service's settings give, beside the fields of config.json."""
_ARCHITECTURES = {"Qwen2ForProcessRewardModel": QwenMath.name, "Qwen2ForPrmModel": Skywork.name}
"""Architectures that identify a format."""


def find_format(info: ModelInfo) -> str | None:
    """Return the name of a served model's format, from the service's settings, its config.json or its architecture.

    ``None`` for a model without a known format.
    """
    configured = info.extra.get(FORMAT_NOTE)
    if configured is not None:
        return str(configured)
    notes = info.extra.get("reasoner_prm")
    if isinstance(notes, str):
        return notes
    if isinstance(notes, dict) and isinstance(notes.get("format"), str):
        return str(notes["format"])
    return _ARCHITECTURES.get(info.architecture)


def open_format(engine: EngineClient, info: ModelInfo) -> Format:
    """Return the format of a served model. Raises ``EngineError`` that lists the formats."""
    name = find_format(info)
    if name is None:
        raise EngineError(
            f"model {info.id!r} is not known to be a process reward model: name its format, which is one of "
            f"{', '.join(FORMATS)}, as 'reasoner_prm' in its config.json or by REASONER_PRM_FORMAT"
        )
    if name not in FORMATS:
        raise EngineError(f"model {info.id!r} has PRM format {name!r}; known are {', '.join(FORMATS)}")
    chosen = FORMATS[name]
    if chosen.kind != info.kind:
        wanted = {"generate": "a causal language model", "classify": "a model that classifies tokens"}[chosen.kind]
        raise EngineError(
            f"PRM format {name!r} is for {wanted}, and model {info.id!r} ({info.architecture}) is not one"
        )
    notes = info.extra.get("reasoner_prm")
    own = {field: value for field, value in notes.items() if field != "format"} if isinstance(notes, dict) else {}
    return chosen(engine, info, own)
