"""The count of prompt tokens that an ideal cache must compute."""

from __future__ import annotations

from benchmarks.service.traffic import ideal_prompt_tokens


def test_an_ideal_cache_computes_each_block_once_and_every_last_token() -> None:
    prompt = [1, 2, 3, 4, 5]
    assert ideal_prompt_tokens([(prompt, [[]])], 2) == 5
    assert ideal_prompt_tokens([(prompt, [[], []])], 2) == 5 + 1
    assert ideal_prompt_tokens([(prompt[:4], [[], []])], 2) == 4 + 2  # the last block has the last token
    grown = [*prompt, 6, 7]
    assert ideal_prompt_tokens([(prompt, [[6, 7]]), (grown, [[]])], 2) == 5 + 1
    assert ideal_prompt_tokens([(prompt, [[8, 9]]), (grown, [[]])], 2) == 5 + 3
