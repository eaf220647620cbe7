"""The tokenizer of the bundled models: whole numbers, whole words and ``"\\n\\n"`` are one token each.

Text is split by one regular expression; a piece that is in the vocabulary is one token and any other piece falls back
to its bytes, so every text survives a round trip. The vocabulary is 256 bytes, the numbers 0 to 499, the pieces that
the suites' training problems use, and six special tokens.

    python -m recipes.bundled.tokenizer
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split

from reasoner.evaluation.suites.registry import POLICY_SUITES, get_family
from reasoner.jobs.tool_specs import PYTHON_INSTRUCTION
from recipes.bundled import SHIPPED, WORK
from recipes.suites.arithmetic import sample_calls
from recipes.suites.solutions import sample_solution

PIECES = r"\n\n|\\boxed\{|\d+|[.,:]? ?[A-Za-z]+(?: (?=\d))?| [+\-*/=] |, (?=\d)|."
NUMBERS = range(500)
SPECIAL = ("<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|system|>", "<|unused|>")
PAD, USER, ASSISTANT, END, SYSTEM = range(5)
SEPARATOR = "\n\n"
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FOLDER = WORK / "tokenizer"

THOUGHT_PIECES = ("Wait", ", back", " to ", "Alternatively", ", from ", "Therefore ", " works")
"""Pieces of the thoughts of the policy that thinks, which its tokenizer has in addition."""
CHECK_PIECES = (
    *("Verdict", ": Yes", ": No", ": A", ": B", "Check", "Compare", "First", "Second", "Then", "A", "B"),
    *(", makes ", ", misses ", ", used ", ", wrong", ", breaks", " missing", "breaks"),
)
"""Pieces of the checker's prompts and critiques, which its tokenizer has in addition."""
PYTHON_PIECES = (
    r"```python|```output|```|\n|\\boxed\{|\d{1,3}(?=(?:\d{3})*(?!\d))|print\(|[.,:]? ?[A-Za-z]+(?: (?=\d))?"
    r"| (?:[+\-*%=]|//?) |, (?=\d)|."
)
"""Pieces of the policy that calls Python: numbers are split into groups of three digits from the right, so that copying
a large one takes two or three tokens, and a line break is a token alone, so that injected text ends where a token
ends."""
THOUGHT_TOKENS = ("<think>", "</think>")
THINKING_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{{ message['content'].split('</think>')[-1].lstrip('\\n') + '<|end|>' }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)


def build() -> Tokenizer:
    """Build the tokenizer, deterministically."""
    split = Split(Regex(PIECES), behavior="isolated")
    counts: Counter[str] = Counter()
    for name in POLICY_SUITES:
        suite = get_family(name)
        for level in suite.LEVELS:
            for seed in range(1500):
                problem = suite.generate_problem("train", f"tokenizer/{seed}", level)
                text = SEPARATOR.join([problem.text, *sample_solution(problem, random.Random(seed))])
                counts.update(piece for piece, _ in split.pre_tokenize_str(text))
    words = [piece for piece in sorted(counts) if not piece.isdigit()]
    return _assemble(split, [SEPARATOR, *map(str, NUMBERS), *words])


def _assemble(split: Split, pieces: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with the special tokens, all bytes, and these pieces."""
    to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    entries = dict.fromkeys([*SPECIAL, *sorted(ByteLevel.alphabet())])
    for piece in pieces:
        entries.setdefault("".join(part for part, _ in to_bytes.pre_tokenize_str(piece)))
    tokenizer = Tokenizer(BPE({entry: i for i, entry in enumerate(entries)}, [], ignore_merges=True))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def build_thinking() -> Tokenizer:
    """Build the tokenizer of the policy that thinks: the same token ids, and new ones for thoughts."""
    tokenizer = _extend(load(), THOUGHT_PIECES)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in THOUGHT_TOKENS])
    return tokenizer


def build_checker() -> Tokenizer:
    """Build the tokenizer of the checker: the token ids of the policy that thinks, and new ones for critiques."""
    return _extend(load(), (*THOUGHT_PIECES, *CHECK_PIECES))


def build_python() -> Tokenizer:
    """Build the tokenizer of the policy that calls Python, deterministically: other pieces, the same special tokens."""
    split = Split(Regex(PYTHON_PIECES), behavior="isolated")
    texts = [PYTHON_INSTRUCTION, "```python\n```output\n```\n"]
    suite = get_family("arithmetic")
    for level in suite.LEVELS:
        for seed in range(1500):
            problem = suite.generate_problem("train", f"tokenizer/{seed}", level)
            rng = random.Random(seed)
            texts += [problem.text, *sample_solution(problem, rng)]
            texts += [f"{call.plan}\n{call.code}" for call in sample_calls(problem, rng)]
    words = {piece for text in texts for piece, _ in split.pre_tokenize_str(text) if not piece.isdigit()}
    groups = [*map(str, range(10, 100)), *(f"{group:03d}" for group in range(1000))]
    return _assemble(split, [*groups, *sorted(words)])


def group_values(tokenizer: Tokenizer) -> dict[int, int]:
    """Return the number of each token that is a group of one to three digits."""
    return {token: int(entry) for entry, token in tokenizer.get_vocab().items() if entry.isascii() and entry.isdigit()}


def _extend(tokenizer: Tokenizer, pieces: Sequence[str]) -> Tokenizer:
    spec = json.loads(tokenizer.to_str())
    vocabulary: dict[str, int] = spec["model"]["vocab"]
    to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    for piece in pieces:
        vocabulary.setdefault("".join(part for part, _ in to_bytes.pre_tokenize_str(piece)), len(vocabulary))
    return Tokenizer.from_str(json.dumps(spec))


def save(folder: Path, tokenizer: Tokenizer, template: str = TEMPLATE, longest: int = 512) -> None:
    """Write the files for ``AutoTokenizer``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[PAD],
        "eos_token": SPECIAL[END],
        "additional_special_tokens": [SPECIAL[USER], SPECIAL[ASSISTANT], SPECIAL[SYSTEM]],
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load() -> Tokenizer:
    """Load the tokenizer built here, or else the shipped one."""
    made = FOLDER / "tokenizer.json"
    return Tokenizer.from_file(str(made if made.exists() else SHIPPED / "policy" / "tokenizer.json"))


_IDS: dict[str, int] = {}


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of a text that is one token (all tokenizers of a process are the same one)."""
    if text not in _IDS:
        (_IDS[text],) = tokenizer.encode(text, add_special_tokens=False).ids
    return _IDS[text]


def encode_prompt(tokenizer: Tokenizer, text: str, system: str | None = None) -> list[int]:
    """Return the token ids of one user message in the chat template, after a system message if there is one."""
    ids = [USER, *tokenizer.encode(text, add_special_tokens=False).ids, ASSISTANT]
    return ids if system is None else [SYSTEM, *tokenizer.encode(system, add_special_tokens=False).ids, *ids]


if __name__ == "__main__":
    save(FOLDER, build())
    print(f"{load().get_vocab_size()} tokens -> {FOLDER}")
