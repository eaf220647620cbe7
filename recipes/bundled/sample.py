"""Sample the policy in lock-step batches, and keep labelled samples of training problems for the PRM.

    python -m recipes.bundled.sample --problems 12000 --each 8
"""

from __future__ import annotations

from tokenizers import Tokenizer


class SampledAttempts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        raise NotImplementedError
