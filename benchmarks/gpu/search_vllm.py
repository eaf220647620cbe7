"""The searches on vLLM, in an interpreter that has it: ``python -m benchmarks.gpu.search_vllm FOLDER < SEARCHES``.

Reads searches as JSON and writes a line of JSON for each that it can run, after its name. Best-of-N is one call with
``n``; a tree is a loop over calls, in which survivors' prefixes are cached. Grades are the log-probabilities of one
further token. Scores of a PRM are left out: vLLM would need a second engine for them.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.gpu.search_work import GRADES, QUESTION, WARM_TOKENS, Beam, Search, Seen, choose, make_prompt

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""Read when vLLM is imported."""
_LOGPROBS = 20
"""Alternatives of which the grades' probabilities are read; those that are missing count as nothing."""


def main() -> int:
    """Run the searches of standard input, each after a short one of its kind; return the exit status."""
    from vllm import LLM

    searches = [Search(**fields) for fields in json.load(sys.stdin)]
    engine = LLM(
        sys.argv[1],
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_num_seqs=256,
        max_model_len=max(search.prompt + search.rounds * search.tokens + len(QUESTION) + 16 for search in searches),
    )
    for search in searches:
        if search.scores == "prm":
            continue
        run(engine, replace(search, tokens=min(search.tokens, WARM_TOKENS)), 1)
        engine.reset_prefix_cache()
        print(json.dumps([search.name, search.scores, asdict(run(engine, search, 2))]), flush=True)
    return 0


def run(engine: Any, search: Search, seed: int) -> Seen:
    """Run one search from a cold cache."""
    start, scoring = time.perf_counter(), 0.0
    beams = [make_prompt(search, seed)]
    for turn in range(search.rounds):
        beams = grow(engine, search, beams, seed + 100 * turn)
        begun = time.perf_counter()
        scores = grade(engine, beams) if search.scores == "grades" else [0.0] * len(beams)
        scoring += time.perf_counter() - begun
        beams = choose(search, beams, scores)
    return Seen(time.perf_counter() - start, scoring)


def grow(engine: Any, search: Search, beams: Sequence[Beam], seed: int) -> list[Beam]:
    """Return the beams that continue each of ``beams``."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            n=search.beams // len(beams),
            temperature=1.0,
            seed=seed + index,
            max_tokens=search.tokens,
            ignore_eos=True,
            detokenize=False,
        )
        for index in range(len(beams))
    ]
    answers = engine.generate([{"prompt_token_ids": list(beam.path)} for beam in beams], sampling, use_tqdm=False)
    return [
        beam.grow(sample.token_ids) for beam, answer in zip(beams, answers, strict=True) for sample in answer.outputs
    ]


def grade(engine: Any, beams: Sequence[Beam]) -> list[float]:
    """Return the expected grade of each beam."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=_LOGPROBS, detokenize=False)
    prompts = [{"prompt_token_ids": [*beam.path, *QUESTION]} for beam in beams]
    answers = engine.generate(prompts, sampling, use_tqdm=False)
    found = []
    for answer in answers:
        known = answer.outputs[0].logprobs[0]
        found.append(sum(rank * math.exp(known[token].logprob) for rank, token in enumerate(GRADES) if token in known))
    return found


if __name__ == "__main__":
    sys.exit(main())
