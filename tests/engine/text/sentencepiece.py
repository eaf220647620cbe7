"""Small tokenizers whose decoders treat the first token of a text differently, and checkpoints with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.engine.conftest import save_checkpoint

SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
WORDS = ["▁", "▁the", "▁cat", "cat", "▁sat", "a", "b", "c", "t", "s", "e", "h", "A", ".", "▁a", "▁A", "\n", "s.", "▁é"]


def build(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's, Gemma's or Mistral's (``metaspace``), of the same vocabulary."""
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    merges = [("▁t", "he"), ("c", "a"), ("ca", "t"), ("▁", "a"), ("▁", "A"), ("s", "."), ("▁", "cat"), ("▁", "é")]
    parts = {part for merge in merges for part in (*merge, "".join(merge))}
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*words, *sorted(parts)]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        replace = normalizers.Replace(" ", "▁")
        is_llama = kind == "llama"
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if is_llama else replace
    if kind != "gemma":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    bos = [("<s>", vocabulary["<s>"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=bos)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)


def save(kind: str, folder: Path) -> PreTrainedTokenizerFast:
    """Save a random checkpoint with such a tokenizer."""
    save_checkpoint("llama", folder)
    tokenizer = build(kind)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    eos = {"eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config | eos))
    (folder / "generation_config.json").write_text(json.dumps(eos))
    return tokenizer
