"""Text to token ids and back, safe to use from several threads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.protocol.types import EngineError, InvalidRequest

_PARTS = 16384
"""Tokenised parts of score requests that are remembered: a tree search re-sends the same steps many times."""
LONG_TEXT = 4096
"""Characters from which on a text is not remembered, and is best tokenised on a thread."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Works on the ``tokenizers`` object itself: transformers' wrapper sets padding and truncation on it at every call,
    which fails when two threads do so at once.
    """

    def __init__(self, folder: Path, vocab: int) -> None:
        """Raises ``EngineError`` when there is no fast tokenizer or it has ids that the model has no embedding for."""
        from transformers import PreTrainedTokenizerFast  # seconds to import, so only where a model is served

        if not (folder / "tokenizer.json").exists():
            raise EngineError(f"{folder} has no tokenizer.json; save the checkpoint with its fast tokenizer")
        try:
            self._wrapper: Any = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # whatever a broken file makes the parsers raise
            raise EngineError(f"{folder} has no loadable tokenizer: {error}") from error
        self._fast: Any = self._wrapper.backend_tokenizer
        self._fast.no_padding()
        self._fast.no_truncation()
        vocabulary = self._fast.get_vocab(with_added_tokens=True)
        self._longest = max(map(len, vocabulary), default=1)
        largest = max(vocabulary.values(), default=-1)
        if largest >= vocab:
            raise EngineError(f"{folder}: the tokenizer has token id {largest}, but the model's vocab_size is {vocab}")
        self.eos: int | None = self._wrapper.eos_token_id
        self.bos: int | None = self._wrapper.bos_token_id
        self._remembered = lru_cache(_PARTS)(self.encode)
        self.piece = lru_cache(_PARTS)(self._piece)
        """The text of one token alone, special ones too; bytes that are no character as ``token_id:`` and the id."""

    def check_length(self, text: str, context: int, field: str) -> None:
        """Raises ``InvalidRequest`` for a text that is too long for ``context`` tokens, however they are chosen.

        Tokenising it first would take minutes of processor time and gigabytes for the longest body that arrives.
        """
        most = context * self._longest
        if len(text) > most:
            raise InvalidRequest(f"{field} has {len(text)} characters; {context} tokens hold at most {most}", field)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text; no special tokens are added."""
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        if len(text) <= LONG_TEXT:
            return tuple(self._fast.encode(text, add_special_tokens=special).ids)
        # Only the call for a batch lets go of the interpreter's lock.
        return tuple(self._fast.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Token ids of a whole prompt, with what the checkpoint puts around one (Llama and Gemma: a first token).

        A text that begins with that token already, as a chat template's does, does not get it twice.
        """
        ids = self._encode(text, special=True)
        return ids[1:] if ids[:2] == (self.bos, self.bos) else ids

    def encode_part(self, text: str) -> tuple[int, ...]:
        """The same, remembering the latest short texts."""
        return self._remembered(text) if len(text) <= LONG_TEXT else self.encode(text)

    def encode_chat(self, messages: Sequence[dict[str, str]], *, generation_prompt: bool = True) -> tuple[int, ...]:
        """Token ids of chat messages through the checkpoint's template.

        The template writes all special tokens itself, so none are added to its text.
        """
        if not self._wrapper.chat_template:
            raise InvalidRequest("the model has no chat template; give a plain text instead of messages", "messages")
        try:
            text = self._wrapper.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # a template is a program and may raise anything
            raise InvalidRequest(f"the chat template refused the messages: {error}", "messages") from error
        return self.encode(text)

    def decode_all(self, tokens: Sequence[int]) -> str:
        """The text of the tokens with the special ones."""
        text: str = self._fast.decode(tokens, skip_special_tokens=False)
        return text

    def _piece(self, token: int) -> str:
        text = self.decode_all([token])
        return f"token_id:{token}" if "\ufffd" in text else text

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens without special ones. A character that is cut in two shows as U+FFFD."""
        text: str = self._fast.decode(tokens, skip_special_tokens=True)
        return text
