"""Options of an engine: defaults, bounds and help texts, shared by the engine, its command line and the settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16"]
KVDType = Literal["auto", "int8", "fp8", "int4"]


def _define_option(default: Any, help_text: str, **limits: Any) -> Any:
    """Return a dataclass field with its help text and its bounds in Pydantic's terms (``ge``, ``gt``, ``le``) or
    ``choices``.
    """
    return field(
        default=default, metadata={"kind": int if default is None else type(default), "help": help_text, **limits}
    )


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engine of each served model."""

    kv_tokens: int | None = _define_option(
        None,
        "The number of tokens whose keys and values each model keeps, in running sequences and cached prefixes. "
        "Without it, on a CPU what 1 GiB holds, at most 131072; on a GPU what fits (gpu_memory_utilization)",
        ge=1,
    )
    state_slots: int | None = _define_option(
        None,
        "The number of states that each model with recurrent layers keeps, two for each running sequence and the rest "
        "for cached prefixes. Without it what 1 GiB holds, on a GPU a quarter of the memory for keys, at most six for "
        "each of max_running",
        ge=1,
    )
    page_size: int = _define_option(16, "The number of tokens in a page of the KV cache", ge=1)
    max_running: int = _define_option(256, "The maximum number of sequences of a model that run at once", ge=1)
    max_waiting: int = _define_option(
        4096, "The maximum number of waiting sequences, and of sequences in one request; more are refused", ge=1
    )
    step_tokens: int = _define_option(2048, "The maximum number of tokens computed in one step", ge=1)
    lease_share: float = _define_option(0.5, "The share of the KV cache that leases may pin", ge=0, le=1)
    lease_seconds: float = _define_option(600.0, "The number of seconds after which an unused lease ends", gt=0)
    cache_disk: str | None = _define_option(
        None,
        "A folder in which each model keeps the keys, values and states of leased prefixes that memory has no room "
        "for; they come back when their search goes on, and are removed when the engine ends. Without it they are "
        "computed again",
        kind=str,
        metavar="FOLDER",
    )
    """The files tell what was said: they are readable by the engine's user alone."""
    cache_disk_gb: float | None = _define_option(
        None,
        "The size in GiB of each model's files in cache_disk, 10 without it; those used longest ago go first",
        kind=float,
        gt=0,
    )
    cache_host_gb: float = _define_option(
        0.0,
        "The size in GiB of the host's memory in which each model on a GPU keeps such prefixes, before they go to "
        "cache_disk; without it 1 if there is a cache_disk",
        ge=0,
    )
    draft: str = _define_option(
        "off",
        "The drafter of speculative decoding, which changes no result: auto (what ships in the model's folder "
        "'drafter', else ngram), off, ngram, mtp, draft_model=FOLDER, medusa=FOLDER, eagle=FOLDER, eagle3=FOLDER or "
        "dflash=FOLDER",
    )
    draft_length: int = _define_option(
        8, "The maximum number of draft tokens in a row for one sequence in a step, up to 16", ge=1
    )
    probe: str = _define_option(
        "auto",
        "The probe that scores a model's own solutions from its hidden states, at no cost: auto (the folder 'probe' in "
        "the model's folder, or NAME.probe beside NAME.gguf, if there is one), off, or a folder that 'reasoner prm "
        "train --probe' wrote",
    )
    deterministic: bool = _define_option(
        False, "Make the bits of each result independent of what else runs or is cached, on CPU and GPU; slower"
    )
    """Without it, results depend on the batch and on the cache by rounding only (about 1e-6 of a logit in float32, and
    a hundredth in bfloat16)."""
    device: str = _define_option(
        "auto", "The device that computes models; auto is a GPU if there is one", choices=get_args(Device)
    )
    dtype: str = _define_option(
        "auto",
        "The dtype of weights, keys and values; auto is bfloat16 on a GPU, and float32 on a CPU, which has no other",
        choices=get_args(DType),
    )
    kv_dtype: str = _define_option(
        "auto",
        "The dtype of the KV cache; int8 and fp8 keep two to four times as many tokens, and int4 four to seven times, "
        "at a loss, for heads whose size is a multiple of 32; auto is the dtype",
        choices=get_args(KVDType),
    )
    """8 bits (``fp8`` is e4m3) have a scale for each token and head, 4 bits one for each 32 of their numbers.

    The entry of a token in the cache is a function of its own key and value, whoever computed it, when and in which
    batch: ``deterministic`` holds to the bit. Without it, rounding before the quantization may tip a number to its
    neighbour, which changes logits by up to 1e-3. The logits of the bundled policy differ from those of float32 by
    0.6 % of their spread with int8, and by 3 % with fp8; ``benchmarks/results/kv`` has the divergence with each type.
    """
    gpu_memory_utilization: float = _define_option(
        0.9,
        "The share of a GPU's memory that the engine may use in all: weights, the largest step and, without kv_tokens, "
        "keys and values in what is left, the same for each model",
        gt=0,
        le=1,
    )
    """The rest is for what torch and the driver do not count, such as the code of kernels and CUDA graphs."""
    strict_config: bool = _define_option(
        False,
        "Refuse a model whose config.json has a field that the engine's own implementation of its architecture does "
        "not compute, instead of running it by transformers' code",
    )
    debug: bool = _define_option(
        False, "Check all invariants of the cache and the scheduler when idle, and stop if one is broken"
    )
