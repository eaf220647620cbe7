"""Finite texts of recursive languages: a rule or a schema that always leads to itself has none.

A rule is productive if one of its alternatives consists of productive symbols, as in the reduction of context-free
grammars (Hopcroft and Ullman, Introduction to Automata Theory, section 4.4). The least fixed point is computed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from engine.protocol.json_schema import resolve

_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\.\d+)?(?:\[[^\]]*\])?\s*:", re.MULTILINE)
_TOKEN = re.compile(
    r"\s+|//[^\n]*|#[^\n]*"
    r'|(?P<text>"(?:\\.|[^"\\])*"i?|/(?:\\.|\[(?:\\.|[^\]\\])*\]|[^/\\\n])+/[a-z]*|<[^>\n]+>)'
    r"|(?P<embedded>%\w+\s*(?=\{))"
    r"|(?P<repeat>\{\s*(?P<least>\d*)\s*(?:,\s*\d*\s*)?\}|~\s*(?P<count>\d+)(?:\s*\.\.\s*\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<sign>[|()\[\]*+?])|."
)

_MATCHED, _UNMATCHED = ("text", ""), ("endless", "")
"""Tokens of a rule's body that some finite text matches, and that none does."""


def find_endless_start(grammar: str, is_empty: Callable[[str], bool] | None = None) -> str | None:
    """Return the name of the start rule of a Lark grammar if no text of it is finite, else ``None``.

    Names that the grammar does not define count as productive, since the library reports them itself. ``is_empty``
    tells of a grammar of one expression that nothing matches it; by default each expression matches something.
    """
    rules = _split_rules(grammar)
    productive: set[str] = set()
    if is_empty is not None:
        # A terminal may combine expressions by operators of sets, so it is decided as a whole.
        source = _select_terminals(grammar)
        for name in [name for name in rules if _is_terminal(name)]:
            rules[name] = [_UNMATCHED if is_empty(f"{source}\nstart: {name}") else _MATCHED]
        for body in rules.values():
            for index, (kind, text) in enumerate(body):
                if kind == "text" and text.startswith("/") and is_empty(f"start: {text}"):
                    body[index] = _UNMATCHED
    while True:
        more = {
            name
            for name, tokens in rules.items()
            if name not in productive and _Alternatives(tokens, rules.keys() - productive).are_productive()
        }
        if not more:
            return "start" if "start" in rules and "start" not in productive else None
        productive |= more


def can_schema_end(schema: dict[str, Any]) -> bool:
    """Return False if each JSON value under the schema contains another one, so that none is finite."""
    targets = {reference: resolve(schema, reference) for reference in set(_list_references(schema))}
    productive = {reference for reference, target in targets.items() if target is None}
    while True:
        more = {
            reference
            for reference, target in targets.items()
            if reference not in productive and _can_end(target, productive)
        }
        if not more:
            return _can_end(schema, productive)
        productive |= more


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _select_terminals(grammar: str) -> str:
    """Return the definitions of a grammar's terminals alone, which refer to no rules."""
    starts = list(_RULE.finditer(grammar))
    ends = [start.start() for start in starts[1:]] + [len(grammar)]
    return "\n".join(
        grammar[start.start() : end] for start, end in zip(starts, ends, strict=True) if _is_terminal(start[1])
    )


def _split_rules(grammar: str) -> dict[str, list[tuple[str, str]]]:
    """Return the tokens of each rule's body by the rule's name."""
    starts = list(_RULE.finditer(grammar))
    rules: dict[str, list[tuple[str, str]]] = {}
    for index, start in enumerate(starts):
        end = starts[index + 1].start() if index + 1 < len(starts) else len(grammar)
        rules[start[1]] = list(_tokenize(grammar[start.end() : end]))
    return rules


def _tokenize(body: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(body):
        found = _TOKEN.match(body, position)
        if found is None:
            return
        position = found.end()
        if found["embedded"]:  # %json {…} and %regex {…}
            try:
                value, position = json.JSONDecoder().raw_decode(body, position)
            except ValueError:
                return
            endless = found["embedded"].startswith("%json") and isinstance(value, dict) and not can_schema_end(value)
            yield _UNMATCHED if endless else _MATCHED
        elif found["repeat"]:
            least = found["least"] or found["count"] or "0"
            yield ("sign", "?" if int(least) == 0 else "+")
        elif found.lastgroup in ("text", "name", "sign"):
            yield (found.lastgroup, found[0])


class _Alternatives:
    """Recursive descent over a rule's body."""

    def __init__(self, tokens: list[tuple[str, str]], unproductive: set[str]) -> None:
        self._tokens, self._unproductive = [*tokens, ("end", "")], unproductive
        self._position = 0

    def are_productive(self) -> bool:
        """Return True if one of the alternatives up to the next closing bracket consists of productive items."""
        result, sequence = False, True
        while True:
            kind, text = self._tokens[self._position]
            if kind == "end" or text in (")", "]"):
                return result or sequence
            if text == "|":
                self._position += 1
                result, sequence = result or sequence, True
            else:
                sequence &= self._read_item()

    def _read_item(self) -> bool:
        kind, text = self._tokens[self._position]
        self._position += 1
        productive = kind != "endless" and not (kind == "name" and text in self._unproductive)
        if kind == "sign" and text in ("(", "["):
            productive = self.are_productive() or text == "["
            self._position += self._tokens[self._position][0] != "end"
        while self._tokens[self._position] in (("sign", "*"), ("sign", "?"), ("sign", "+")):
            productive |= self._tokens[self._position][1] != "+"
            self._position += 1
        return productive


def _list_references(part: Any) -> Iterator[str]:
    if isinstance(part, dict) and isinstance(part.get("$ref"), str):
        yield part["$ref"]
    if isinstance(part, dict | list):
        for inner in part.values() if isinstance(part, dict) else part:
            yield from _list_references(inner)


def _can_end(schema: Any, productive: set[str]) -> bool:
    """Return True if a finite value is valid. ``productive``: references to schemas with finite values."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    if isinstance(schema.get("$ref"), str) and schema["$ref"] not in productive:
        return False
    for name in ("anyOf", "oneOf"):
        if schema.get(name) and not any(_can_end(option, productive) for option in schema[name]):
            return False
    if not all(_can_end(part, productive) for part in schema.get("allOf") or ()):
        return False
    types = schema.get("type", "null")
    types = [types] if isinstance(types, str) else types
    return any(_can_type_end(kind, schema, productive) for kind in types)


def _can_type_end(kind: str, schema: dict[str, Any], productive: set[str]) -> bool:
    if kind == "object":
        properties, others = schema.get("properties") or {}, schema.get("additionalProperties")
        needed = [properties.get(name, others) for name in schema.get("required") or ()]
        if (schema.get("minProperties") or 0) > sum(_can_end(value, productive) for value in properties.values()):
            needed.append(None if schema.get("patternProperties") else others)
    elif kind == "array":
        prefix = schema.get("prefixItems") or []
        count = schema.get("minItems") or 0
        needed = [*prefix[:count], *([schema.get("items")] if count > len(prefix) else [])]
    else:
        return True
    return all(_can_end(value, productive) for value in needed)
