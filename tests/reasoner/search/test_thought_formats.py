"""The delimiters of public thinking models are found by their tokenizers, and their templates' prompts are understood.

The templates are written from the documented formats of the models; their tokenizers have the same special tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from engine.protocol.types import InvalidRequest, ModelInfo, TokenizeRequest
from engine.text.tokenizer import Tokenizer as EngineTokenizer
from reasoner.jobs.thought_spec import ThoughtSpec
from reasoner.search.policies.thoughts import find_thought_format
from reasoner.thoughts import ThoughtFormat
from reasoner.tree import ThoughtState

QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
DEEPSEEK_R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1] }}<|end_of_sentence|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
GPT_OSS = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort|default('medium') }}\n\n"
    "# Valid channels: analysis, commentary, final.<|end|>"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MAGISTRAL = (
    "[SYSTEM_PROMPT]First draft your thinking process: [THINK]here[/THINK]. Then answer.[/SYSTEM_PROMPT]"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
GLM_4_5 = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% if m.role == 'user' and enable_thinking is defined and not enable_thinking %}/nothink{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}\n<think></think>{% endif %}{% endif %}"
)
THINK = ("<think>", "</think>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>")
TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen3": (QWEN3, ("<|im_start|>", "<|im_end|>", *THINK)),
    "deepseek-r1": (DEEPSEEK_R1, ("<|User|>", "<|Assistant|>", "<|end_of_sentence|>", *THINK)),
    "gpt-oss": (GPT_OSS, (*HARMONY, "analysis", "assistant", "final")),
    "magistral": (MAGISTRAL, ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[THINK]", "[/THINK]")),
    "glm-4.5": (GLM_4_5, ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "/nothink", *THINK)),
    "none": (QWEN3, ("<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>")),
}  # fmt: skip
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"


class Tokens:
    """The part of an engine that finds the delimiters: the real tokenizer of a model folder."""

    def __init__(self, folder: Path, name: str) -> None:
        template, tokens = TEMPLATES[name]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = ["analysis", "assistant", "final"] if name == "gpt-oss" else []
        vocabulary = {piece: index for index, piece in enumerate([*alphabet, *words])}
        fast = Tokenizer(BPE(vocabulary, [], ignore_merges=True))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        special = [token for token in tokens if token not in words]
        fast.add_special_tokens([AddedToken(token, normalized=False, special=token not in THINK) for token in special])
        fast.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        self.text = EngineTokenizer(folder, 1000)

    async def tokenize(self, request: TokenizeRequest) -> tuple[int, ...]:
        if isinstance(request.text, str):
            return self.text.encode(request.text)
        return self.text.encode_chat(
            request.text, generation_prompt=request.generation_prompt, template_kwargs=request.template_kwargs
        )

    async def find(self, thoughts: ThoughtSpec | None = None) -> ThoughtFormat | None:
        return await find_thought_format(self, ModelInfo("policy", "generate", 99, 1000, 0), thoughts)  # type: ignore[arg-type]

    def state(self, found: ThoughtFormat, **variables: Any) -> ThoughtState:
        messages = [{"role": "user", "content": "What is </think>?"}]
        return found.find_state(self.text.encode_chat(messages, template_kwargs=variables))


@pytest.mark.parametrize(
    ("name", "opening", "closing", "state"),
    [
        ("qwen3", "<think>", "</think>", "undecided"),
        ("deepseek-r1", "<think>", "</think>", "open"),
        ("gpt-oss", "<|channel|>analysis<|message|>", FINAL, "undecided"),
        ("magistral", "[THINK]", "[/THINK]", "undecided"),
        ("glm-4.5", "<think>", "</think>", "undecided"),
    ],
)  # fmt: skip
async def test_delimiters_are_found_and_a_prompt_that_opens_the_thought_is_recognised(
    tmp_path: Path, name: str, opening: str, closing: str, state: ThoughtState
) -> None:
    tokens = Tokens(tmp_path, name)
    found = await tokens.find()
    assert found is not None
    assert (found.opening, found.closing, found.has_end_token) == (opening, closing, True)
    assert tokens.state(found) == state
    assert tokens.text.decode_all((*found.closing_ids[:1], *found.rest_ids)) == closing
    assert closing in found.forced
    assert found.closing_ids[0] in found.forced_ids


@pytest.mark.parametrize("name", ["qwen3", "glm-4.5"])
async def test_a_prompt_with_an_empty_thought_is_answered_without_one(tmp_path: Path, name: str) -> None:
    tokens = Tokens(tmp_path, name)
    found = await tokens.find()
    assert found is not None
    assert tokens.state(found, enable_thinking=False) == "closed"
    assert tokens.state(found, enable_thinking=True) == "undecided"


async def test_a_variable_reaches_its_template_and_an_unknown_one_is_refused_with_those_that_there_are(
    tmp_path: Path,
) -> None:
    text = Tokens(tmp_path, "gpt-oss").text
    messages = [{"role": "user", "content": "hi"}]
    assert "Reasoning: high" in text.decode_all(
        text.encode_chat(messages, template_kwargs={"reasoning_effort": "high"})
    )
    with pytest.raises(InvalidRequest, match="no variable 'enable_thinking': its variables are reasoning_effort"):
        text.encode_chat(messages, template_kwargs={"enable_thinking": True})


async def test_a_model_without_thoughts_has_no_delimiters_unless_the_job_names_some(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path, "none")
    assert await tokens.find() is None
    found = await tokens.find(ThoughtSpec(open="BEGIN", close="DONE", forced=None))
    assert found is not None
    assert (found.opening, found.closing, found.has_end_token) == ("BEGIN", "DONE", False)


async def test_delimiters_that_the_tokenizer_cannot_spell_are_refused_by_name() -> None:
    class OnlyLetters:
        async def tokenize(self, request: TokenizeRequest) -> tuple[int, ...]:
            return tuple(ord(char) if char.isascii() and char.isalpha() else 0 for char in request.text)

    info = ModelInfo("words", "generate", 99, 1000, 0)
    with pytest.raises(InvalidRequest, match=r"thoughts.close: the tokenizer of model 'words' cannot spell '\[end\]'"):
        await find_thought_format(OnlyLetters(), info, ThoughtSpec(open="begin", close="[end]", forced=None))  # type: ignore[arg-type]
