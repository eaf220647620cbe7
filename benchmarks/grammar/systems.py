"""The process of one library: answers to all schemas by chance, a JSON line for each.

``python -m benchmarks.grammar.systems NAME MODEL FIRST``: the library, a GGUF file with the vocabulary, and the index
of the first schema. The first line has the seconds for starting.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tests.engine.grammar.completion import Vocabulary, complete_text, find_fault
from tests.engine.grammar.published import EXAMPLES, REFUSED
from tests.engine.grammar.schemas import generate_schemas, plant_keywords

Words = npt.NDArray[np.int32]
SEED, RANDOM, PLANTED, ATTEMPTS = 0, 1000, 100, 3
MAX_MASKS = 300
"""Number of masks of an answer whose times are reported."""


class Position(Protocol):
    """One text under a schema's grammar."""

    def compute_mask(self) -> Words: ...

    def accept(self, token: int) -> object: ...


Start = Callable[[Any], Callable[[], Position]]
"""Compiles a schema, for any number of texts. Raises an exception for one that it refuses."""


def list_schemas() -> dict[str, list[Any]]:
    """Return all schemas by their kind, in the order of their indices."""
    return {
        "random": list(generate_schemas(SEED, RANDOM)),
        "published": [*EXAMPLES.values(), *(schema for schema, _ in REFUSED.values())],
        "with unsupported keywords": [planted.schema for planted in plant_keywords(SEED, PLANTED)],
    }


def start_ours(folder: Path, vocabulary: int, eos: int) -> Start:
    """Return llguidance as the engine uses it."""
    from engine.protocol.constraint import Constraint
    from engine.sampling.grammar import Grammar, GrammarCompiler
    from engine.text.tokenizer import Tokenizer

    class Held:
        def __init__(self, grammar: Grammar) -> None:
            self.grammar = grammar
            self.accept = grammar.accept

        def compute_mask(self) -> Words:
            words = self.grammar.compute_masks((), ())[0]
            assert words is not None
            return words

    compiler = GrammarCompiler(Tokenizer(folder, vocabulary).to_json, vocabulary, {eos})
    compiler.start(Constraint("choice", '["a"]'), (), frozenset())

    def compile_schema(schema: Any) -> Callable[[], Position]:
        constraint = Constraint("json", json.dumps(schema))
        compiler.start(constraint, (), frozenset())
        return lambda: Held(compiler.start(constraint, (), frozenset()))

    return compile_schema


def start_llguidance(folder: Path, vocabulary: int, eos: int) -> Start:
    """Return llguidance with its defaults."""
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=vocabulary, eos_token=[eos])

    class Alone:
        def __init__(self, matcher: LLMatcher) -> None:
            self.matcher = matcher
            self.words: Words = np.zeros(-(-vocabulary // 32), np.int32)

        def compute_mask(self) -> Words:
            self.matcher.unsafe_compute_mask_ptr(self.words.ctypes.data, self.words.nbytes)
            if self.matcher.is_error():
                raise RuntimeError(self.matcher.get_error().splitlines()[0])
            return self.words

        def accept(self, token: int) -> object:
            return self.matcher.consume_token(token)

    def compile_schema(schema: Any) -> Callable[[], Position]:
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return lambda: Alone(matcher.deep_copy())

    return compile_schema


def start_xgrammar(folder: Path, vocabulary: int, eos: int, **options: Any) -> Start:
    """Return xgrammar with its defaults."""
    import xgrammar
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=[eos])
    compiler = xgrammar.GrammarCompiler(info)

    class Matched:
        def __init__(self, grammar: Any) -> None:
            self.matcher = xgrammar.GrammarMatcher(grammar)
            self.accept = self.matcher.accept_token
            self.words: Words = np.full((1, -(-vocabulary // 32)), -1, np.int32)

        def compute_mask(self) -> Words:
            self.words.fill(-1)
            self.matcher.fill_next_token_bitmask(self.words)
            words: Words = self.words[0]
            return words

    def compile_schema(schema: Any) -> Callable[[], Position]:
        grammar = compiler.compile_json_schema(json.dumps(schema), **options)
        return lambda: Matched(grammar)

    return compile_schema


def start_xgrammar_lax(folder: Path, vocabulary: int, eos: int) -> Start:
    """Return xgrammar with properties and items that a schema does not name, as JSON Schema has them."""
    return start_xgrammar(folder, vocabulary, eos, strict_mode=False)


SYSTEMS: dict[str, Callable[[Path, int, int], Start]] = {
    "ours": start_ours,
    "llguidance": start_llguidance,
    "xgrammar": start_xgrammar,
    "xgrammar strict_mode=False": start_xgrammar_lax,
}
MODULES = {name: name.split()[0] if name != "ours" else "llguidance" for name in SYSTEMS}


def try_schema(compile_schema: Start, schema: Any, name: str, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the outcome, the reason if it is no valid answer, and the seconds of compiling and of masks."""
    masks: list[float] = []
    start = time.perf_counter()
    try:
        begin = compile_schema(schema)
    except BaseException as error:  # also a panic of a library, which is no Exception
        return {"outcome": "refused", "reason": f"{type(error).__name__}: {error}"[:300]}
    seconds = time.perf_counter() - start
    told = {"compile": seconds, "masks": masks}
    for attempt in range(ATTEMPTS):
        position = begin()

        def compute_mask(position: Position = position) -> Words:
            start = time.perf_counter()
            words = position.compute_mask()
            masks.append(time.perf_counter() - start)
            return words

        try:
            text = complete_text(compute_mask, position.accept, vocabulary, random.Random(f"{name} {attempt}"))
        except Exception as error:  # no token is allowed, or the library gives up
            return told | {"outcome": "stuck", "reason": f"{type(error).__name__}: {error}"[:300]}
        if text is not None:
            try:
                fault = find_fault(schema, text)
            except Exception as error:  # a reference that leads nowhere, which the library took all the same
                fault = f"{type(error).__name__}: {error}"[:300]
            return told | {"outcome": "valid" if fault is None else "invalid", "reason": fault}
    return told | {"outcome": "not completed", "reason": None}


def main() -> None:
    """Write the seconds for starting, then the outcomes from the given index on."""
    from engine.gguf.folder import open_checkpoint
    from engine.text.tokenizer import Tokenizer

    name, model, first = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    folder = open_checkpoint(model)
    size: int = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer(folder, size)
    assert tokenizer.eos is not None
    start = time.perf_counter()
    compile_schema = SYSTEMS[name](folder, size, tokenizer.eos)
    print(json.dumps({"vocabulary": time.perf_counter() - start, "size": size}), flush=True)
    schemas = [(kind, schema) for kind, group in list_schemas().items() for schema in group]
    vocabulary = Vocabulary.from_tokenizer(tokenizer, tokenizer.eos)
    for index, (kind, schema) in enumerate(schemas[first:], first):
        told = try_schema(compile_schema, schema, f"{SEED} {index}", vocabulary)
        told["masks"] = told.get("masks", [])[:MAX_MASKS]
        print(json.dumps({"index": index, "kind": kind, **told}), flush=True)


if __name__ == "__main__":
    main()
