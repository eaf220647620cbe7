"""Random-weight checkpoints with a small byte-level tokenizer, made once per run."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForTokenClassification,
)

Checkpoints = Callable[[str], Path]

# A GPU machine may have torch and transformers only; everything but the server runs there.
collect_ignore = [] if find_spec("fastapi") and find_spec("httpx") else ["test_server.py", "test_client.py"]

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = ["step one: add 3 and 4 to get 7.\n\n", "so the answer is \\boxed{42}\n", "naïve café 你好 🙂🙃 x = 1 + 30"]

_SIZES = {
    "vocab_size": 400,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """``checkpoints(kind)`` is the folder of a checkpoint: llama, qwen3, llama_classify or qwen3_classify."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            save_checkpoint(kind, made[kind])
        return made[kind]

    return make


def save_checkpoint(kind: str, folder: Path) -> None:
    torch.manual_seed(7)
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(folder)
    common = _SIZES | {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": None, "bos_token_id": None}
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common, rope_theta=5000.0))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**common, tie_word_embeddings=True))
    elif kind == "llama_classify":
        model = LlamaForTokenClassification(LlamaConfig(**common, num_labels=3))
    else:
        model = Qwen3ForTokenClassification(Qwen3Config(**common, num_labels=2))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"reasoner_prm": {"kind": "test"}}))


def small_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE)
