"""The parts of published chat templates that render calls and their outputs, with real tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from engine.protocol.types import TokenizeRequest
from engine.text.tokenizer import Tokenizer as EngineTokenizer
from tests.reasoner.search.test_thoughts_on_engine import POLICY
from tests.reasoner.tools.formats.rendering import (
    RENDERERS,
    Renderer,
    deepseek_token,
    write_llama3,
    write_mistral_list,
    write_mistral_with_ids,
)

_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_IM_TOOL = (
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
_IM_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN3 = (
    _TOOLS + "{% for m in messages %}{% if m.tool_calls %}<|im_start|>assistant\n"
    '{% for c in m.tool_calls %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n" + _IM_TOOL + _IM_PROMPT
)
QWEN3_THINKING = QWEN3.removesuffix("{% endif %}") + "<think>\n{% endif %}"
QWEN3_CODER = (
    _TOOLS + "{% for m in messages %}{% if m.tool_calls %}<|im_start|>assistant\n"
    "{% for c in m.tool_calls %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for name, value in c.function.arguments | items %}<parameter={{ name }}>\n{{ value }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n" + _IM_TOOL + _IM_PROMPT
)
_LLAMA_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA_3_1 = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    + _TOOLS
    + "{% for m in messages %}{% if m.tool_calls %}"
    + _LLAMA_HEADER.format("assistant")
    + '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>"
    "{% elif m.role == 'tool' %}"
    + _LLAMA_HEADER.format("ipython")
    + "{{ m.content | tojson }}<|eot_id|>{% else %}"
    + _LLAMA_HEADER.format("{{ m.role }}")
    + "{{ m.content }}<|eot_id|>{% endif %}{% endfor %}{% if add_generation_prompt %}"
    + _LLAMA_HEADER.format("assistant")
    + "{% endif %}"
)
MISTRAL_V3 = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}"
    '[TOOL_CALLS] [{"name": "{{ m.tool_calls[0].function.name }}", "arguments": '
    '{{ m.tool_calls[0].function.arguments | tojson }}, "id": "000000000"}]</s>'
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] "
    '{"content": {{ m.content }}, "call_id": "000000000"}[/TOOL_RESULTS]'
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL_V11 = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}"
    "[TOOL_CALLS]{{ m.tool_calls[0].function.name }}[CALL_ID]000000000[ARGS]"
    "{{ m.tool_calls[0].function.arguments | tojson }}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]000000000[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
_END_OF_SENTENCE = "<\uff5cend\u2581of\u2581sentence\uff5c>"
DEEPSEEK_V3 = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'user' %}<\uff5cUser\uff5c>{{ m.content }}{% elif m.tool_calls %}"
    "<\uff5cAssistant\uff5c>" + deepseek_token("calls begin") + deepseek_token("call begin") + "function"
    "" + deepseek_token("sep") + "{{ m.tool_calls[0].function.name }}\n```json\n"
    "{{ m.tool_calls[0].function.arguments }}\n```"
    + deepseek_token("call end") + deepseek_token("calls end") + _END_OF_SENTENCE + "{% elif m.role == 'tool' %}"
    + deepseek_token("outputs begin") + deepseek_token("output begin") + "{{ m.content }}"
    + deepseek_token("output end") + deepseek_token("outputs end")
    + "{% else %}<\uff5cAssistant\uff5c>{{ m.content }}" + _END_OF_SENTENCE + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<\uff5cAssistant\uff5c>{% endif %}"
)  # fmt: skip
GPT_OSS = (
    _TOOLS + "{% for m in messages %}{% if m.tool_calls %}<|start|>assistant to=functions."
    "{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% elif m.role == 'tool' %}"
    "<|start|>functions.python to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A family of models: its template, its special tokens, and how its models write a call."""

    format: str
    template: str
    special: tuple[str, ...]
    write: Renderer
    end_of_turn: str = ""
    """The token that ends a call, unless a delimiter before it does."""


_IM = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>")
_DEEPSEEK = (
    *map(deepseek_token, ("calls begin", "call begin", "sep", "call end", "calls end")),
    *map(deepseek_token, ("outputs begin", "output begin", "output end", "outputs end")),
    *("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", _END_OF_SENTENCE),
)
_MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>")


def _write_deepseek(_: str, calls: Any) -> str:
    """Write a call up to the delimiter that ends it, at which generation stops."""
    return RENDERERS["deepseek"][1]("", calls).removesuffix(deepseek_token("calls end"))


def _write_harmony(_: str, calls: Any) -> str:
    [(name, arguments)] = calls
    return f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(arguments)}<|call|>"


FAMILIES: Mapping[str, Family] = {
    "qwen3": Family("hermes", QWEN3, _IM, RENDERERS["hermes"][1]),
    "qwen3-thinking": Family("hermes", QWEN3_THINKING, (*_IM, "<think>", "</think>"), RENDERERS["hermes"][1]),
    "qwen3-coder": Family("qwen_xml", QWEN3_CODER, _IM, RENDERERS["qwen_xml"][1]),
    "llama-3.1": Family(
        "llama3_json",
        LLAMA_3_1,
        ("<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        write_llama3,
        "<|eot_id|>",
    ),
    "mistral-v3": Family("mistral", MISTRAL_V3, _MISTRAL, write_mistral_list, "</s>"),
    "mistral-v11": Family(
        "mistral",
        MISTRAL_V11,
        (*_MISTRAL, "[CALL_ID]", "[ARGS]", "[TOOL_CONTENT]"),
        write_mistral_with_ids,
        "</s>",
    ),
    "deepseek-v3": Family("deepseek", DEEPSEEK_V3, _DEEPSEEK, _write_deepseek),
    "gpt-oss": Family("harmony", GPT_OSS, _HARMONY, _write_harmony),
}


class FamilyTokens:
    """The part of an engine that tokenizes, with the bundled policy's vocabulary and a family's special tokens."""

    def __init__(self, folder: Path, family: Family) -> None:
        fast = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
        fast.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in family.special])
        fast.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": family.template}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        self.text = EngineTokenizer(folder, 1 << 20)

    async def tokenize(self, request: TokenizeRequest) -> tuple[int, ...]:
        if isinstance(request.text, str):
            return self.text.encode(request.text)
        return self.text.encode_chat(
            request.text, generation_prompt=request.generation_prompt, template_kwargs=request.template_kwargs
        )
