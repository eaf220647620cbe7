"""Train a verifier adapter: a LoRA adapter of the policy that judges its own branches.

At the end of each step of a rollout the invocation tokens follow, and the adapter learns to go on with one of two label
tokens; its score is the probability of the first one against the other. Weights of the base are frozen. An activated
adapter (Greenewald et al., "Activated LoRA", 2025) counts in the invocation alone, so that it reads the keys that the
policy computed when it wrote. Generative verifiers: Zhang et al., 2024, section 3.1.

The invocations after all steps of a solution are computed in one pass: each sees the branch up to its own step, by the
attention mask, at the positions that it will have there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.adapters.judge import JudgeTokens
from engine.text.tokenizer import Tokenizer
from prm.records import BadRecord
from prm.training.adapter_data import InvocationBatch, make_batches
from prm.training.data import EncodedExample, TrainingData, split_examples
from prm.training.loop import Progress, Trained, TrainingPlan, run_training
from prm.training.lora import attach, list_parameters, save_adapter
from prm.training.probe_data import ProbeLabels, read_rollouts

_ALPHA = 2
"""Scale of an update: ``lora_alpha`` over the rank."""


@dataclass(frozen=True, slots=True)
class AdapterPlan(TrainingPlan):
    """Settings of an adapter. ``base``: the policy that made the rollouts of ``data`` (``prm.rollouts.file``)."""

    is_activated: bool = True
    labels: ProbeLabels = "soft"
    rank: int = 16
    invocation: str = "\n\n?"
    """Text whose tokens follow a branch to ask for the verdict. Its meaning is learnt, and each token is computed for
    each verdict: a short one is as good."""
    positive: str = "Yes"
    negative: str = "No"
    rate: float = 3e-4


class AdapterTrainee:
    """The frozen base with the adapter's modules."""

    def __init__(self, plan: AdapterPlan) -> None:
        self.model = _load(plan)
        self._plan = plan
        tokenizer = Tokenizer(Path(plan.base), self.model.config.vocab_size)
        self.tokens = find_judge_tokens(tokenizer, plan)
        torch.manual_seed(plan.seed)
        modules, self._rows = attach(self.model, plan.rank, _ALPHA * plan.rank)
        self.trained = list_parameters(modules)

    def make_batches(self, examples: Sequence[EncodedExample]) -> list[InvocationBatch]:
        return make_batches(examples, self.tokens.invocation, self._plan.batch_tokens, self._plan.device)

    def compute_logits(self, batch: InvocationBatch) -> Tensor:
        """Return the logits ``[labels, vocab]`` behind the labelled invocations."""
        self._rows.mask = batch.is_invocation if self._plan.is_activated else None
        device = batch.ids.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            logits: Tensor = self.model(
                input_ids=batch.ids,
                attention_mask=batch.mask,
                position_ids=batch.positions,
                logits_to_keep=batch.reads,
                use_cache=False,
            ).logits
        return logits.flatten(0, 1)[batch.at].float()

    def compute_loss(self, logits: Tensor, batch: InvocationBatch) -> Tensor:
        """Return the sum of the cross-entropies of the labels, against the whole vocabulary."""
        logprobs = logits.log_softmax(1)
        positive, negative = logprobs[:, self.tokens.positive], logprobs[:, self.tokens.negative]
        return -(batch.labels * positive + (1 - batch.labels) * negative).sum()

    def score(self, logits: Tensor) -> list[float]:
        """Return the probabilities of the positive label against the other one."""
        return (logits[:, self.tokens.positive] - logits[:, self.tokens.negative]).sigmoid().tolist()

    def export(self, folder: Path) -> None:
        """Write the adapter in PEFT's format, with the tokens by which it is asked."""
        settings: dict[str, Any] = {
            "base_model_name_or_path": Path(self._plan.base).name,
            "r": self._plan.rank,
            "lora_alpha": _ALPHA * self._plan.rank,
        }
        if self._plan.is_activated:
            settings["alora_invocation_tokens"] = list(self.tokens.invocation)
        save_adapter(folder, self.trained, settings)
        self.tokens.save(folder)


def train_adapter(plan: AdapterPlan, progress: Progress, stopped: Callable[[], bool] = lambda: False) -> Trained | None:
    """Train, validate and write an adapter. Return ``None`` if stopped; the same call then resumes.

    Raises ``BadRecord`` for invalid data or settings, ``EngineError`` for an unusable tokenizer.
    """
    plan.check()
    trainee = AdapterTrainee(plan)
    optimizer = torch.optim.AdamW(trainee.trained.parameters(), lr=plan.rate, weight_decay=0.0)
    data = _read_data(plan, trainee)
    return run_training(plan, trainee, optimizer=optimizer, data=data, progress=progress, stopped=stopped)


def find_judge_tokens(tokenizer: Tokenizer, plan: AdapterPlan) -> JudgeTokens:
    """Return the tokens of a plan's texts. Raises ``BadRecord`` if one has none, or both labels begin alike."""
    invocation = tuple(tokenizer.encode(plan.invocation))
    positive, negative = (tuple(tokenizer.encode(label))[:1] for label in (plan.positive, plan.negative))
    if not invocation:
        raise BadRecord(f"the invocation {plan.invocation!r} has no token in this tokenizer: choose another")
    if not positive or not negative or positive == negative:
        raise BadRecord(f"this tokenizer does not tell {plan.positive!r} from {plan.negative!r}: choose other labels")
    return JudgeTokens(invocation, positive[0], negative[0])


def _load(plan: AdapterPlan) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            plan.base, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
        )
    except (OSError, ValueError, KeyError) as error:
        raise BadRecord(f"{plan.base} is no base for an adapter: {error}") from None
    kinds = getattr(model.config, "layer_types", None)
    has_window = kinds is None and bool(getattr(model.config, "sliding_window", None))
    if has_window or set(kinds or ["full_attention"]) != {"full_attention"}:
        raise BadRecord(
            f"{plan.base} has layers that do not attend to all tokens: adapters are trained here on models whose "
            "layers all do; PEFT trains others"
        )
    return model.to(plan.device)


def _read_data(plan: AdapterPlan, trainee: AdapterTrainee) -> TrainingData:
    config, size = trainee.model.config, len(trainee.tokens.invocation)
    longest = min(plan.max_tokens, getattr(config, "max_position_embeddings", plan.max_tokens) - size)
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    encoded, shortened = [], 0
    for rollout in read_rollouts(Path(plan.data), plan.labels):
        if max(rollout.tokens) >= config.vocab_size:
            raise BadRecord(f"{plan.data} was not made by {plan.base}: it has tokens that this model has not")
        # An end-of-sequence token is no part of the text, and a verifier leaves it out.
        ends = [end - (rollout.tokens[end - 1] in eos) for end in rollout.ends]
        kept = [end for end in ends if end <= longest]
        shortened += len(kept) < len(ends)
        if kept:
            ids, labels = rollout.tokens[: kept[-1]], rollout.labels[: len(kept)]
            encoded.append(EncodedExample(rollout.question, ids, tuple(kept), labels))
    return TrainingData(*split_examples(encoded), shortened)
