"""Train a verifier adapter: a LoRA adapter of the policy that judges its own branches.

At the end of each step of a rollout the invocation tokens follow, and the adapter learns to go on with one of two label
tokens; its score is the probability of the first one against the other. Weights of the base are frozen. An activated
adapter (Greenewald et al., "Activated LoRA", 2025) counts in the invocation alone, so that it reads the keys that the
policy computed when it wrote. Generative verifiers: Zhang et al., 2024, section 3.1.

The invocations after all steps of a solution are computed in one pass: each sees the branch up to its own step, by the
attention mask, at the positions that it will have there. A run is determined by its settings and its data, and resumes
from its last checkpoint.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.adapters.judge import JudgeTokens
from engine.text.tokenizer import Tokenizer
from prm.records import BadRecord
from prm.training.adapter_data import InvocationBatch, make_batches
from prm.training.checkpoint import load_checkpoint, save_checkpoint
from prm.training.data import EncodedExample, select_examples, split_examples, steps_per_epoch
from prm.training.lora import attach, list_parameters, save_adapter
from prm.training.probe_data import ProbeLabels, read_rollouts
from prm.training.train import CLIP, SAVE_SECONDS, Progress, Trained, schedule
from prm.training.validation import Validation, validate

_ALPHA = 2
"""Scale of an update: ``lora_alpha`` over the rank."""


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    base: str
    """Folder of the policy that made the rollouts."""
    data: str
    """File of rollouts (``prm.rollouts.file``)."""
    out: str
    """Folder of the adapter, which must not exist yet; the checkpoint is beside it during training."""
    is_activated: bool = True
    labels: ProbeLabels = "soft"
    rank: int = 16
    invocation: str = "\n\n?"
    """Text whose tokens follow a branch to ask for the verdict. Its meaning is learnt, and each token is computed for
    each verdict: a short one is as good."""
    positive: str = "Yes"
    negative: str = "No"
    epochs: int = 1
    batch: int = 32
    """Number of solutions in an optimizer step."""
    batch_tokens: int = 8192
    """Maximum number of padded tokens in a forward pass (or one solution), which bounds memory."""
    max_tokens: int = 4096
    """Maximum length of a branch in tokens, also limited by the context; longer ones lose their last steps."""
    rate: float = 3e-4
    seed: int = 0
    device: str = "cpu"


class _Trainee:
    """The frozen base with the adapter's modules."""

    def __init__(self, plan: AdapterPlan) -> None:
        self.model = _load(plan)
        tokenizer = Tokenizer(Path(plan.base), self.model.config.vocab_size)
        self.tokens = find_judge_tokens(tokenizer, plan)
        torch.manual_seed(plan.seed)
        modules, self._rows = attach(self.model, plan.rank, _ALPHA * plan.rank)
        self.parameters = list_parameters(modules)
        self._is_activated = plan.is_activated

    def compute_logits(self, batch: InvocationBatch) -> Tensor:
        """Return the logits ``[labels, vocab]`` behind the labelled invocations."""
        self._rows.mask = batch.is_invocation if self._is_activated else None
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


def train_adapter(plan: AdapterPlan, progress: Progress, stopped: Callable[[], bool] = lambda: False) -> Trained | None:
    """Train, validate and write an adapter. Return ``None`` if stopped; the same call then resumes.

    Raises ``BadRecord`` for invalid data or settings, ``EngineError`` for an unusable tokenizer.
    """
    out, work = Path(plan.out), Path(f"{plan.out}.work")
    if out.exists():
        raise BadRecord(f"{out} is there already: name another folder for the adapter")
    trainee = _Trainee(plan)
    learned, held_out, shortened = _read_data(plan, trainee)
    optimizer = torch.optim.AdamW(trainee.parameters.parameters(), lr=plan.rate, weight_decay=0.0)
    settings = _collect_settings(plan)
    state = work / "state.safetensors"
    step, seconds = load_checkpoint(state, trainee.parameters, optimizer, settings)
    total = plan.epochs * steps_per_epoch(len(learned), plan.batch)
    saved, running = time.monotonic(), 0.0
    trainee.model.train()
    while step < total:
        started = time.monotonic()
        group = [learned[index] for index in select_examples(step, len(learned), plan.batch, plan.seed)]
        loss = _run_step(trainee, group, plan, optimizer=optimizer, factor=schedule(step, total))
        step += 1
        now = time.monotonic()
        seconds += now - started
        running = loss if running == 0 else 0.95 * running + 0.05 * loss
        progress(step, total, f"loss {running:.4f}")
        ending = stopped()
        if ending or now - saved > SAVE_SECONDS:
            save_checkpoint(state, trainee.parameters, optimizer, settings=settings, step=step, seconds=seconds)
            saved = now
        if ending:
            return None
    progress(total, total, "validating")
    validation = _validate(trainee, held_out, plan)
    _export(trainee, plan, out, work)
    shutil.rmtree(work, ignore_errors=True)
    return Trained(
        plan.out,
        total,
        examples=len(learned),
        held_out=len(held_out),
        shortened=shortened,
        seconds=seconds,
        validation=validation,
    )


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

    if plan.device == "cuda" and not torch.cuda.is_available():
        raise BadRecord("device 'cuda' is requested, but torch finds none here; use 'cpu'")
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


def _read_data(plan: AdapterPlan, trainee: _Trainee) -> tuple[list[EncodedExample], list[EncodedExample], int]:
    """Return training examples, validation examples, and the number of shortened ones."""
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
    learned, held_out = split_examples(encoded)
    return learned, held_out, shortened


def _collect_settings(plan: AdapterPlan) -> dict[str, Any]:
    """Return the settings that determine the weights and thus identify the run."""
    with open(plan.data, "rb") as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
    return {name: value for name, value in asdict(plan).items() if name != "out"} | {"data": digest}


def _run_step(
    trainee: _Trainee,
    group: Sequence[EncodedExample],
    plan: AdapterPlan,
    optimizer: torch.optim.Optimizer,
    factor: float,
) -> float:
    """Take an optimizer step on the mean loss of a group's labels; return that loss."""
    count, loss = sum(len(example.labels) for example in group), 0.0
    for batch in make_batches(group, trainee.tokens.invocation, plan.batch_tokens, plan.device):
        part = trainee.compute_loss(trainee.compute_logits(batch), batch) / count
        part.backward()  # type: ignore[no-untyped-call]
        loss += float(part.detach())
    nn.utils.clip_grad_norm_(trainee.parameters.parameters(), CLIP)
    for options in optimizer.param_groups:
        options["lr"] = plan.rate * factor
    optimizer.step()
    optimizer.zero_grad()
    return loss


@torch.inference_mode()
def _validate(trainee: _Trainee, examples: Sequence[EncodedExample], plan: AdapterPlan) -> Validation:
    trainee.model.eval()
    loss = 0.0
    scores: list[float] = []
    labels: list[float] = []
    questions: list[str] = []
    for batch in make_batches(examples, trainee.tokens.invocation, plan.batch_tokens, plan.device):
        logits = trainee.compute_logits(batch)
        loss += float(trainee.compute_loss(logits, batch))
        scores += trainee.score(logits)
        labels += batch.labels.tolist()
        questions += batch.questions
    return validate(loss / len(labels), scores, labels, questions)


def _export(trainee: _Trainee, plan: AdapterPlan, out: Path, work: Path) -> None:
    """Write the adapter's folder, atomically by a rename."""
    made, tokens = work / "export", trainee.tokens
    shutil.rmtree(made, ignore_errors=True)
    settings: dict[str, Any] = {
        "base_model_name_or_path": Path(plan.base).name,
        "r": plan.rank,
        "lora_alpha": _ALPHA * plan.rank,
    }
    if plan.is_activated:
        settings["alora_invocation_tokens"] = list(tokens.invocation)
    save_adapter(made, trainee.parameters, settings)
    tokens.save(made)
    made.rename(out)
