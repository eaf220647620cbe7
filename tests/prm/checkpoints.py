"""Random-weight process reward models of every public format, and their scores by transformers.

``reference`` renders a solution as the model card does, as one text, and computes it in one forward pass.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors.numpy
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from tests.rounding import float32_bound
from tests.seeds import shift

FORMATS = {
    "token_classification": "token_classification",
    "qwen_math": "qwen_math",
    "skywork": "skywork",
    "math_shepherd": "math_shepherd",
    "rlhflow_llama": "rlhflow",
    "rlhflow_mistral": "rlhflow",
}
"""Format of each checkpoint kind."""
_CLASSES = {
    "token_classification": "Qwen3ForTokenClassification",
    "qwen_math": "Qwen2ForCausalLM",
    "skywork": "Qwen2ForCausalLM",
    "math_shepherd": "MistralForCausalLM",
    "rlhflow_llama": "LlamaForCausalLM",
    "rlhflow_mistral": "MistralForCausalLM",
    "outcome": "LlamaForSequenceClassification",
    "outcome_two": "Qwen2ForSequenceClassification",
}
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|stop|>\n\n{{ m['content'] | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
_TEMPLATES = {"rlhflow_llama": _LLAMA, "rlhflow_mistral": _MISTRAL}
_LLAMA_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_CORPUS = ["Step 1: add 3 and 4 to get 7. + - user", "so the answer is \\boxed{42}", "How many? naive 1 + 30 = 31"]
_SPECIAL = ["<unk>", "<|begin|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<extra_0>"]


def save_checkpoint(kind: str, folder: Path, *, special: Sequence[str] = ("ки",)) -> Path:
    """Write a checkpoint with a tokenizer of its family.

    ``special``: additional special tokens of a byte-level tokenizer.
    """
    torch.manual_seed(shift(11))
    folder.mkdir(parents=True, exist_ok=True)
    spaces = kind in ("math_shepherd", "rlhflow_mistral")
    tokenizer = _metaspace() if spaces else _byte_level([*_SPECIAL, *special])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=_TEMPLATES.get(kind, _CHATML),
    )
    wrapped.save_pretrained(folder)
    model_class = getattr(transformers, _CLASSES[kind])
    config = model_class.config_class(
        vocab_size=700,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=512,
        initializer_range=0.3,
        num_labels=1 if kind == "outcome" else 2,
        tie_word_embeddings=False,
        pad_token_id=wrapped.pad_token_id,
    )
    model_class(config).save_pretrained(folder)
    _give_head(kind, folder)
    written = json.loads((folder / "config.json").read_text())
    notes: dict[str, Any] = {"reasoner_prm": {"format": FORMATS.get(kind)}}
    if kind == "token_classification":
        notes["reasoner_prm"] |= {"separator": "\n\n", "positive_label": 1}
    if kind in ("qwen_math", "skywork") or kind not in FORMATS:
        notes = {}  # their architectures determine the format
    architectures = {"qwen_math": "Qwen2ForProcessRewardModel", "skywork": "Qwen2ForPrmModel"}
    if kind in architectures:
        notes["architectures"] = [architectures[kind]]
    (folder / "config.json").write_text(json.dumps(written | notes))
    return folder


def _give_head(kind: str, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    if kind == "qwen_math":
        del weights["lm_head.weight"]
        weights |= {"score.0.weight": torch.randn(48, 48) * 0.2, "score.0.bias": torch.randn(48)}
        weights |= {"score.2.weight": torch.randn(2, 48) * 0.2, "score.2.bias": torch.randn(2)}
    if kind == "skywork":
        weights |= {"v_head.summary.weight": torch.randn(1, 48) * 0.2, "v_head.summary.bias": torch.randn(1)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _byte_level(special: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_LLAMA_WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*_CORPUS * 4, "\n\n"] * 4, trainer)
    return tokenizer


def _metaspace() -> Tokenizer:
    """Return a Llama-style tokenizer: a space before a text that stands alone, unknown characters as bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False
    )
    tokenizer.train_from_iterator([*_CORPUS, "ки ки [INST] [/INST]"] * 8, trainer)
    first = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", first)])
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in _SPECIAL])
    return tokenizer


@torch.no_grad()
def reference(kind: str, folder: Path, question: str, steps: Sequence[str]) -> list[float]:
    """Return the score of every step."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": question}]
    match kind:
        case "token_classification":
            # TRL's PRMTrainer: each completion tokenized separately, a separator after each, its label at the
            # separator's end.
            model = _loaded(AutoModelForTokenClassification, folder)
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            ends = []
            for step in steps:
                ids += tokenizer.encode(step, add_special_tokens=False)
                ids += tokenizer.encode("\n\n", add_special_tokens=False)
                ends.append(len(ids) - 1)
            scores = model(torch.tensor([ids])).logits[0].softmax(-1)[:, 1]
            return [float(scores[end]) for end in ends]
        case "qwen_math":
            text = tokenizer.apply_chat_template(
                [
                    {
                        "role": "system",
                        "content": "Please reason step by step, and put your final answer within \\boxed{}.",
                    },
                    *chat,
                    {"role": "assistant", "content": "<extra_0>".join(steps) + "<extra_0>"},
                ],
                tokenize=False,
                add_generation_prompt=False,
            )
            ids = tokenizer.encode(text)
            logits = label_logits(kind, folder, ids)
            mask = torch.tensor(ids) == tokenizer.convert_tokens_to_ids("<extra_0>")
            return [float(score) for score in logits.softmax(-1)[mask][:, 1]]
        case "skywork":
            ids = tokenizer.encode(tokenizer.bos_token + question + "\n")
            ends = []
            for step in steps:
                ids += [*tokenizer.encode(step), tokenizer.encode("\n")[-1]]
                ends.append(len(ids) - 1)
            rewards = torch.sigmoid(label_logits(kind, folder, ids))[:, 0]
            return [float(rewards[end]) for end in ends]
        case "math_shepherd":
            model = _loaded(AutoModelForCausalLM, folder)
            output = "\n".join(f"Step {at}: {step} ки" for at, step in enumerate(steps, 1))
            candidates = tokenizer.encode("+ -")[1:]
            tag = tokenizer.encode("ки")[-1]
            ids = torch.tensor(tokenizer.encode(f"{question} {output}"))
            scores = model(ids[None]).logits[0][:, candidates].softmax(-1)[:, 0]
            return [float(score) for score in scores[ids == tag]]
        case _:
            model = _loaded(AutoModelForCausalLM, folder)
            plus, minus = (tokenizer.encode(word)[-1] for word in "+-")
            conversation: list[dict[str, str]] = []
            found = []
            for at, step in enumerate(steps):
                conversation.append({"role": "user", "content": f"{question} {step}" if at == 0 else step})
                conversation.append({"role": "assistant", "content": "+"})
                ids = tokenizer.apply_chat_template(conversation, return_dict=False)
                logits = model(torch.tensor([ids])).logits[0, -3, [plus, minus]]
                found.append(float(logits.softmax(-1)[0]))
            return found


def _loaded(kind: Any, folder: Path) -> Any:
    """Load a model in torch's default dtype, which is float64 within ``tests.engine.exact.float64``."""
    return kind.from_pretrained(folder, dtype=torch.get_default_dtype()).eval()


def _stored(folder: Path) -> dict[str, Tensor]:
    """Load a checkpoint's tensors in torch's default dtype, read with NumPy because within ``float64`` torch misreads
    stored float32.
    """
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    return {name: torch.from_numpy(array).to(torch.get_default_dtype()) for name, array in arrays.items()}


@lru_cache
@torch.no_grad()
def score_gap(kind: str, folder: Path) -> float:
    """Return the largest allowed difference of a score from another float32 computation of it.

    Each logit may err by the bound of float32 along a text. A probability changes by at most a quarter of a logit's
    change, or of the change of a difference of two.
    """
    ids = torch.randint(10, 380, (250,), generator=torch.Generator().manual_seed(shift(0))).tolist()
    return 2 * 2 / 4 * float32_bound(lambda: _logits(kind, folder, ids))


def _logits(kind: str, folder: Path, ids: Sequence[int]) -> Tensor:
    """Return the logits from which scores are computed, at every token."""
    if kind in ("qwen_math", "skywork", "outcome_two"):
        return label_logits(kind, folder, ids)
    if kind == "outcome":
        model = _loaded(AutoModelForSequenceClassification, folder)
        logits: Tensor = model.score(model.model(torch.tensor([ids])).last_hidden_state[0])
        return logits
    model = _loaded(AutoModelForTokenClassification if kind == "token_classification" else AutoModelForCausalLM, folder)
    logits = model(torch.tensor([ids])).logits[0]
    return logits


def _hidden(folder: Path, ids: Sequence[int]) -> Tensor:
    """Return the final hidden states of transformers' Qwen2 with the checkpoint's weights."""
    config = transformers.Qwen2Config.from_pretrained(folder)
    model = transformers.Qwen2Model(config).eval()
    weights = _stored(folder)
    body = {name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith("model.")}
    model.load_state_dict(body)
    hidden: Tensor = model(torch.tensor([ids])).last_hidden_state[0]
    return hidden


@torch.no_grad()
def label_logits(kind: str, folder: Path, ids: Sequence[int]) -> Tensor:
    """Return the output of a reward model's head at every token, ``[tokens, labels]``, in torch's default dtype."""
    weights = _stored(folder)
    hidden = _hidden(folder, ids)
    if kind == "skywork":
        return nn.functional.linear(hidden, weights["v_head.summary.weight"], weights["v_head.summary.bias"])
    if kind == "outcome_two":
        return nn.functional.linear(hidden, weights["score.weight"])
    hidden = torch.relu(nn.functional.linear(hidden, weights["score.0.weight"], weights["score.0.bias"]))
    return nn.functional.linear(hidden, weights["score.2.weight"], weights["score.2.bias"])


@torch.no_grad()
def next_logprobs(folder: Path, ids: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Return the log-probabilities of ``tokens`` as the next token after a text."""
    model = _loaded(AutoModelForCausalLM, folder)
    logprobs: list[float] = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[list(tokens)].tolist()
    return logprobs
