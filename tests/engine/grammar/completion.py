"""Complete an answer by chance under a grammar's own masks, and validate it with two other implementations."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_rs
import numpy as np

from engine.protocol.constraint import Constraint
from engine.sampling.grammar import Grammar, GrammarCompiler, Words
from engine.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[3] / "reasoner" / "bundled" / "policy"
VOCABULARY = json.loads((FOLDER / "config.json").read_text())["vocab_size"]
EOS = json.loads((FOLDER / "config.json").read_text())["eos_token_id"]
CLOSING = ('"', "}]", ",", "bz@.jsonaetrufl0123456789_-:DHMST", "\\[{")
"""Characters that most likely end a text soon, in this order; those of one text are as good as each other."""
EXACT = Context(prec=10_000)
_HUGE = re.compile(r"\d[eE][+-]?\d{4}")
SOON, MAX_TOKENS = 150, 1500
"""Number of tokens after which only ``CLOSING`` is sampled where it is allowed, and number of tokens without an end
after which a text is given up."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary, in which each character of ``CLOSING`` is a token."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[list[int]], str]
    num_bytes: Mapping[int, int]
    """Number of bytes of each token but the special ones."""
    eos: int

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, eos: int) -> Vocabulary:
        entries = json.loads(tokenizer.to_json())["model"]["vocab"]  # a character of an entry stands for a byte
        lengths = {token: len(entry) for entry, token in entries.items()}
        return cls(tokenizer.encode, tokenizer.decode, lengths, eos)


@cache
def load_vocabulary() -> Vocabulary:
    """Return the vocabulary of the bundled policy."""
    return Vocabulary.from_tokenizer(Tokenizer(FOLDER, VOCABULARY), EOS)


@cache
def make_compiler() -> GrammarCompiler:
    return GrammarCompiler(Tokenizer(FOLDER, VOCABULARY).to_json, VOCABULARY, {EOS})


def start(schema: Any) -> Grammar:
    return make_compiler().start(Constraint("json", json.dumps(schema)), (), frozenset())


def complete(schema: Any, rng: random.Random) -> str | None:
    """Return a random text that the schema's grammar lets end; ``None`` if it did not within ``MAX_TOKENS``."""
    grammar = start(schema)

    def compute_mask() -> Words:
        words = grammar.compute_masks((), ())[0]
        assert words is not None
        return words

    return complete_text(compute_mask, grammar.accept, load_vocabulary(), rng)


def complete_text(
    compute_mask: Callable[[], Words], accept: Callable[[int], object], vocabulary: Vocabulary, rng: random.Random
) -> str | None:
    closing = [{vocabulary.eos}, *({vocabulary.encode(one)[0] for one in characters} for characters in CLOSING)]
    tokens: list[int] = []
    haste = rng.choice((0.02, 0.1, 0.3))
    while len(tokens) < MAX_TOKENS:
        allowed = np.flatnonzero(np.unpackbits(compute_mask().view(np.uint8), bitorder="little")).tolist()
        if len(tokens) > SOON or rng.random() < haste:
            groups = [both for group in closing if (both := sorted(group.intersection(allowed)))] or [allowed]
            while len(groups) > 1 and groups[0] != [vocabulary.eos] and rng.random() < 0.4:
                groups.pop(0)
            allowed = groups[0]
        token = rng.choice(allowed)
        if token == vocabulary.eos:
            return _decode(tokens, vocabulary)
        accept(token)
        tokens.append(token)
    return None


def _decode(tokens: list[int], vocabulary: Vocabulary) -> str:
    text = vocabulary.decode(tokens)
    num_bytes = sum(vocabulary.num_bytes[token] for token in tokens)
    assert len(text.encode()) == num_bytes, f"{text!r} has bytes that are no text"
    return text


def find_fault(schema: Any, text: str) -> str | None:
    """Return the reason why a text is no valid JSON under the schema, by two implementations; ``None`` if it is.

    Numbers are compared as decimals: binary fractions would make 0.3 no multiple of 0.1.
    """
    try:
        value = parse(text)
    except ValueError as error:
        return f"no JSON: {error}"
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    with localcontext(EXACT):
        fault = next(iter(make_validator(exact).iter_errors(value)), None)
    if fault is not None:
        return f"jsonschema: {fault.message}"
    if _HUGE.search(text):
        return None  # jsonschema_rs reads such numbers as null
    validator = jsonschema_rs.Draft202012Validator(exact, validate_formats=True)
    for other in validator.iter_errors(value):
        return f"jsonschema_rs: {other.message}"
    return None


def parse(text: str) -> Any:
    """Return the value of a JSON text. Raises ``ValueError``."""
    return json.loads(text, parse_float=_read_number, parse_constant=_refuse_constant)


def _read_number(text: str) -> Decimal:
    """Return a number; one whose exponent has many digits is as good as one with four."""
    mantissa, _, exponent = text.lower().partition("e")
    return Decimal(mantissa).scaleb(max(-9000, min(9000, int(exponent or 0))), EXACT)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def make_validator(schema: Any) -> jsonschema.protocols.Validator:
    """Return a validator that knows decimals."""
    base = jsonschema.Draft202012Validator
    checker = base.TYPE_CHECKER.redefine("integer", lambda _, value: _is_integer(value))
    return jsonschema.validators.extend(base, type_checker=checker)(schema, format_checker=base.FORMAT_CHECKER)


def _is_integer(value: object) -> bool:
    return not isinstance(value, bool) and (
        isinstance(value, int) or (isinstance(value, Decimal) and value == value.to_integral_value())
    )


def accepts(schema: Any, text: str) -> bool:
    """Return True if the schema's grammar has this whole text."""
    tokens = [*load_vocabulary().encode(text), EOS]
    return start(schema).count_valid(tokens) == len(tokens)


def vary(value: Any, rng: random.Random) -> Any:
    """Return a value that differs at one place, as one that is just invalid does."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        kind = rng.randrange(5)
        if kind == 0:
            return {key: item for key, item in value.items() if key != name}
        if kind == 1:
            return value | {rng.choice(("z", "S_2", "x-2", "extra", "a", "7")): value[name]}
        return value | {name: vary(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        kind = rng.randrange(5)
        if kind == 0:
            return value[:index] + value[index + 1 :]
        if kind == 1:
            return [*value, value[index]]
        return [*value[:index], vary(value[index], rng), *value[index + 1 :]]
    if isinstance(value, str) and rng.random() < 0.8:
        at = rng.randint(0, len(value))
        return value[:at] + rng.choice(("", "a", "😀", "\n", "0", value)) + value[at + rng.randrange(2) :]
    if (
        isinstance(value, int | Decimal)
        and not isinstance(value, bool)
        and -(10**30) < value < 10**30
        and rng.random() < 0.8
    ):
        steps: tuple[Any, ...] = (1, -1, Decimal("0.5"), Decimal("-0.001"), 10, -100)
        numbers: list[Any] = [-value, *(value + step for step in steps)]
        return rng.choice(numbers)
    return rng.choice((None, True, 0, -1, Decimal("1.5"), 3, "", "a", "red", [], [0], {}, {"id": 1}, {"a": None}))


def write(value: Any, rng: random.Random) -> str:
    """Return a value as JSON with numbers as they are; seldom with an escaped name, or with a name twice."""
    if isinstance(value, dict):
        members = [f"{_write_name(name, rng)}: {write(item, rng)}" for name, item in value.items()]
        if members and rng.random() < 0.1:
            members.append(f"{_write_name(rng.choice(list(value)), rng)}: {rng.choice(('null', '1', '[]'))}")
        return "{" + ", ".join(members) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(write(item, rng) for item in value) + "]"
    if isinstance(value, Decimal):
        return f"{value:f}" if abs(value.adjusted()) < 50 else str(value)
    return json.dumps(value, ensure_ascii=False)


def _write_name(name: str, rng: random.Random) -> str:
    text = json.dumps(name, ensure_ascii=False)
    return f'"\\u{ord(name[0]):04x}{text[2:]}' if name[:1].isalnum() and rng.random() < 0.1 else text
