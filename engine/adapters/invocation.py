"""Activation of an adapter within a sequence, and keys of the cache that tell apart what an adapter has changed.

An activated adapter (Greenewald et al., "Activated LoRA", 2025) leaves all tokens before its invocation to the base,
whose keys and values they have: it goes on from pages that the base has cached, and the base from its.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from engine.protocol.types import InvalidRequest

_TAG_SHIFT = 40
"""Bits below an adapter's tag, more than a token id has."""


class TaggedTokens(Sequence[int]):
    """A sequence's tokens as keys of the cache: those from ``start`` on carry the tag of an adapter.

    It is a view: tokens that are appended to the sequence are in it, too.
    """

    __slots__ = ("_start", "_tag", "_tokens")

    def __init__(self, tokens: Sequence[int], adapter_index: int, start: int) -> None:
        self._tokens, self._start, self._tag = tokens, start, (adapter_index + 1) << _TAG_SHIFT

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, int):
            position = index + len(self._tokens) if index < 0 else index
            return self._tokens[index] | (self._tag if position >= self._start else 0)
        first, end, _ = index.indices(len(self._tokens))
        middle = min(max(first, self._start), end)
        return [*self._tokens[first:middle], *(token | self._tag for token in self._tokens[middle:end])]


@dataclass(frozen=True, slots=True)
class Invocation:
    """The index of an adapter among those of its model, and the tokens that activate it (none: it always is)."""

    name: str
    index: int
    tokens: tuple[int, ...] = ()

    def find_start(self, prompt: Sequence[int], field: str) -> int:
        """Return the first position of a prompt at which the adapter is active: that of the last occurrence of its
        invocation tokens.

        Raises ``InvalidRequest`` with the ``field`` if they do not occur: all would be the base's, which has a name.
        """
        own, count = self.tokens, len(self.tokens)
        if not own:
            return 0
        for start in range(len(prompt) - count, -1, -1):
            if prompt[start] == own[0] and tuple(prompt[start : start + count]) == own:
                return start
        raise InvalidRequest(
            f"the activated adapter {self.name!r} begins at the tokens {list(own)}, which the prompt does not have: "
            "append them, or name the base model",
            field,
        )
