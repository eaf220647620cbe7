"""A model's format is found by the marks of its chat template."""

from __future__ import annotations

import pytest

from reasoner.tools.formats.registry import FORMATS, find_format
from tests.reasoner.tools.formats.rendering import deepseek_token

BEGIN, SEP = deepseek_token("calls begin"), deepseek_token("sep")
MARKS = {
    "Qwen2.5": (
        "hermes",
        '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>',
    ),
    "Hermes 3": ("hermes", '{{- \'<tool_call>\n\' }}{"name": <function-name>, "arguments": <args-dict>}'),
    "Qwen3-Coder": ("qwen_xml", "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>"),
    "Llama 3.2": (
        "llama3_json",
        """'{"name": function name, "parameters": dictionary of argument name and its value}.'""",
    ),
    "Llama 4, Python": (
        "pythonic",
        "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    ),
    "Mistral Nemo": ("mistral", '{{- "[TOOL_CALLS][" }}'),
    "Mistral Small 3.2": ("mistral", "{{- '[CALL_ID]' + tool_call.id }}{{- '[TOOL_CALLS]' + name + '[ARGS]' }}"),
    "gpt-oss": ("harmony", '{{- "functions." + tool_call.name + "<|channel|>commentary " }}{{- "<|message|>" }}'),
    "DeepSeek R1": ("deepseek", f"'{BEGIN}' + tool['type'] + '{SEP}' + tool['function']['name'] + '\\n' + '```json'"),
    "DeepSeek V3.1": (
        "deepseek",
        f"'{BEGIN}' + tool['function']['name'] + '{SEP}' + tool['function']['arguments']",
    ),
    "GLM 4.5": (None, "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key> function-name and arguments"),
    "Seed-OSS": (None, "<seed:tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>value_1"),
    "Granite 3.3": (None, "<|tool_call|> arguments"),
    "without tools": (None, "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"),
}
"""Parts of the chat templates of public models."""


@pytest.mark.parametrize("model", MARKS)
def test_marks_identify_the_format(model: str) -> None:
    name, marks = MARKS[model]
    found = find_format(f"{{% if tools %}}{marks}{{% endif %}}")
    assert (found and found.name) == name
    if name is not None:
        assert [other for other, tool_format in FORMATS.items() if tool_format.detect(marks)] == [name]


def test_every_format_is_registered_by_its_name_and_tells_its_delimiters() -> None:
    assert {name: tool_format.name for name, tool_format in FORMATS.items()} == {name: name for name in FORMATS}
    assert {name for name, _ in MARKS.values() if name} == set(FORMATS)
    assert all(tool_format.delimiters for tool_format in FORMATS.values())
