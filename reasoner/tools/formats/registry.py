"""Registry of the formats, and detection of a model's format."""

from __future__ import annotations

from collections.abc import Mapping

from reasoner.tools.formats.base import ToolFormat
from reasoner.tools.formats.deepseek import DeepSeek
from reasoner.tools.formats.harmony import Harmony
from reasoner.tools.formats.hermes import Hermes
from reasoner.tools.formats.llama3_json import Llama3Json
from reasoner.tools.formats.mistral import Mistral
from reasoner.tools.formats.pythonic import Pythonic
from reasoner.tools.formats.qwen_xml import QwenXml

FORMATS: Mapping[str, ToolFormat] = {
    tool_format.name: tool_format
    for tool_format in (
        Harmony(),
        DeepSeek(),
        Mistral(),
        QwenXml(),
        Hermes(),
        Pythonic(),
        Llama3Json(),
    )
}
"""The formats by name, those with the most specific marks first."""


def find_format(chat_template: str) -> ToolFormat | None:
    """Return the format of a model by the marks in its chat template, or ``None`` if it has those of none."""
    return next((tool_format for tool_format in FORMATS.values() if tool_format.detect(chat_template)), None)
