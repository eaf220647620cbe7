"""Random calls, and their texts by the rules of each format, written independently of the readers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from reasoner.tools.formats.answer import ParsedAnswer
from reasoner.tools.formats.call import FunctionTool

Calls = Sequence[tuple[str, Mapping[str, Any]]]
Renderer = Callable[[str, Calls], str]
WEATHER = FunctionTool(
    "get_weather",
    "Weather of a city",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
        "required": ["city"],
    },
)
TIME = FunctionTool("get_time", "The time", {"type": "object", "properties": {}})
TOOLS = (WEATHER, TIME)


def named_tools(*names: str) -> list[FunctionTool]:
    return [FunctionTool(name) for name in names]


@dataclass(frozen=True)
class Example:
    """Calls of random tools."""

    tools: Sequence[FunctionTool]
    text: str
    calls: Calls


def values_of(answer: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


_TEXT = st.text("aZ é☃0.,:\n\t'\"\\{}[]()<>|=/;`", max_size=12)
_NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True)
_NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
_NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | _NUMBERS | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=4,
)
_TYPED: Mapping[str, st.SearchStrategy[Any]] = {
    "string": _TEXT,
    "integer": st.integers(),
    "number": _NUMBERS | st.integers(),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(_NESTED, max_size=3),
    "object": st.dictionaries(_TEXT, _NESTED, max_size=3),
}


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """Draw an answer with up to three calls."""
    names = draw(st.lists(_NAMES, min_size=1, max_size=3, unique=True))
    tools = []
    for name in names:
        types = draw(st.dictionaries(_NAMES, st.sampled_from(sorted(_TYPED)), max_size=3))
        properties = {argument: {"type": kind} for argument, kind in types.items()}
        tools.append(FunctionTool(name, "", {"type": "object", "properties": properties}))
    calls = []
    for tool in draw(st.lists(st.sampled_from(tools), max_size=3)):
        types = {argument: schema["type"] for argument, schema in tool.parameters["properties"].items()}
        calls.append((tool.name, {argument: draw(_TYPED[kind]) for argument, kind in types.items()}))
    text = draw(st.sampled_from(["", "Let me see.", "One\n\ntwo {x}", "f(x) < 3 [1]"]))
    return Example(tools, text, calls)


def write_hermes(text: str, calls: Calls) -> str:
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join([*filter(None, [text]), *(f"<tool_call>\n{written}\n</tool_call>" for written in objects)])


def write_hermes_2(text: str, calls: Calls) -> str:
    objects = [
        json.dumps({"arguments": arguments, "name": name}, ensure_ascii=False, indent=1) for name, arguments in calls
    ]
    return text + "".join(f"<tool_call>{written}</tool_call>" for written in objects)


def write_qwen_xml(text: str, calls: Calls) -> str:
    written = text
    for name, arguments in calls:
        parameters = ""
        for key, value in arguments.items():
            shown = json.dumps(value) if isinstance(value, dict | list) else str(value)  # as its chat template does
            parameters += f"<parameter={key}>\n{shown}\n</parameter>\n"
        written += f"\n<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"
    return written


def write_llama3(text: str, calls: Calls) -> str:
    objects = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls]
    return "\n".join(filter(None, [text, "; ".join(objects)]))


def write_llama3_tagged(text: str, calls: Calls) -> str:
    objects = [json.dumps({"type": "function", "name": name, "parameters": arguments}) for name, arguments in calls]
    return text + ("<|python_tag|>" + ";".join(objects) if calls else "")


def write_mistral(text: str, calls: Calls) -> str:
    return text + "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def write_mistral_with_ids(text: str, calls: Calls) -> str:
    return text + "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]{index:09}[ARGS]{json.dumps(arguments)}"
        for index, (name, arguments) in enumerate(calls)
    )


def write_mistral_list(text: str, calls: Calls) -> str:
    objects = [
        {"name": name, "arguments": arguments, "id": f"{index:09}"} for index, (name, arguments) in enumerate(calls)
    ]
    return text + (f"[TOOL_CALLS] {json.dumps(objects)}" if objects else "")


def write_harmony(text: str, calls: Calls) -> str:
    messages = ["<|channel|>analysis<|message|>I need <a tool>.<|end|>"]
    if text:
        messages.append(f"<|start|>assistant<|channel|>commentary<|message|>{text}<|end|>")
    for name, arguments in calls:
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
        messages.append(f"<|start|>assistant{header}<|message|>{json.dumps(arguments)}<|call|>")
    return "".join(messages)


def write_harmony_recipient_first(text: str, calls: Calls) -> str:
    messages = [
        f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    ]
    if text:
        messages.insert(0, f"<|channel|>final<|message|>{text}<|end|>")
    return "<|start|>assistant".join(messages)


def deepseek_token(name: str) -> str:
    """Return a special token of DeepSeek, which has unusual spaces and bars."""
    return f"<\uff5ctool {name}\uff5c>".replace(" ", "\u2581")


def _join_deepseek(text: str, calls: Sequence[str], separator: str) -> str:
    blocks = [deepseek_token("call begin") + call + deepseek_token("call end") for call in calls]
    return text + (
        deepseek_token("calls begin") + separator.join(blocks) + deepseek_token("calls end") if blocks else ""
    )


def write_deepseek(text: str, calls: Calls) -> str:
    blocks = [f"function{deepseek_token('sep')}{name}\n```json\n{json.dumps(args)}\n```" for name, args in calls]
    return _join_deepseek(text, blocks, "\n")


def write_deepseek_v31(text: str, calls: Calls) -> str:
    return _join_deepseek(text, [f"{name}{deepseek_token('sep')}{json.dumps(args)}" for name, args in calls], "")


def _write_pythonic_call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def write_pythonic(text: str, calls: Calls) -> str:
    written = f"[{', '.join(_write_pythonic_call(*call) for call in calls)}]" if calls else ""
    return "\n".join(filter(None, [text, written]))


def write_pythonic_tagged(text: str, calls: Calls) -> str:
    written = ",".join(_write_pythonic_call(*call) for call in calls)
    return text + (f"<|python_start|>[{written}]<|python_end|>" if calls else "")


RENDERERS: Mapping[str, tuple[str, Renderer]] = {
    "hermes": ("hermes", write_hermes),
    "hermes, arguments first": ("hermes", write_hermes_2),
    "qwen_xml": ("qwen_xml", write_qwen_xml),
    "llama3_json": ("llama3_json", write_llama3),
    "llama3_json with a tag": ("llama3_json", write_llama3_tagged),
    "mistral": ("mistral", write_mistral),
    "mistral with ids": ("mistral", write_mistral_with_ids),
    "mistral_list": ("mistral", write_mistral_list),
    "harmony": ("harmony", write_harmony),
    "harmony, recipient first": ("harmony", write_harmony_recipient_first),
    "deepseek": ("deepseek", write_deepseek),
    "deepseek_v31": ("deepseek", write_deepseek_v31),
    "pythonic": ("pythonic", write_pythonic),
    "pythonic with tags": ("pythonic", write_pythonic_tagged),
}
"""The ways to write each format, with the name of the format."""
