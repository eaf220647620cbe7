"""Text to token ids and back, safe to use from several threads."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.gguf.template_setting import PLAIN_TEMPLATE
from engine.protocol.request_checks import PromptTooLong
from engine.protocol.template_limit import limit_rendering
from engine.protocol.template_variables import check_template_variables
from engine.protocol.types import EngineError, InvalidRequest, TemplateKwargs, TokenIds

_log = logging.getLogger(__name__)

CALL_DELIMITERS = (
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<tool_call>", "</tool_call>"),
    *(f"<\uff5ctool\u2581{name}\uff5c>" for name in ("calls\u2581begin", "call\u2581begin", "sep")),
    *(f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581end", "calls\u2581end")),
)
"""Special tokens of public models between which calls of functions stand: they are part of the text."""
_PARTS = 16384
"""The number of cached tokenized parts of score requests: a tree search sends the same steps many times."""
LONG_TEXT = 4096
"""The length in characters from which a text is not cached, and should be tokenized on a thread."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Uses the ``tokenizers`` object directly: transformers' wrapper sets padding and truncation on it at every call,
    which fails when two threads do so at once.
    """

    def __init__(self, folder: Path, vocab: int, template: str | None = None) -> None:
        """``template`` takes the place of the checkpoint's own.

        Raises ``EngineError`` if there is no fast tokenizer, or if it has ids without an embedding in the model.
        """
        from transformers import PreTrainedTokenizerFast  # takes seconds to import, so only where a model is loaded

        if not (folder / "tokenizer.json").is_file():
            raise EngineError(f"{folder} has no tokenizer.json; save the checkpoint with its fast tokenizer")
        try:
            self._wrapper: Any = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # parsers raise any exception for an invalid file
            raise EngineError(f"{folder} has no loadable tokenizer: {' '.join(str(error).split())}") from error
        if template is not None:
            self._wrapper.chat_template = template
        self._fast: Any = _leave_out_unembedded(self._wrapper.backend_tokenizer, vocab, folder)
        self._fast.no_padding()
        self._fast.no_truncation()
        vocabulary = self._fast.get_vocab(with_added_tokens=True)
        self._longest = max(map(len, vocabulary), default=1)
        largest = max(vocabulary.values(), default=-1)
        if largest >= vocab:
            raise EngineError(f"{folder}: the tokenizer has token id {largest}, but the model's vocab_size is {vocab}")
        self._shown = {vocabulary[text]: text for text in CALL_DELIMITERS if text in vocabulary}
        added = self._fast.get_added_tokens_decoder()
        self.hidden = {token.content: id for id, token in added.items() if token.special and id not in self._shown}
        """Ids of the special tokens that ``decode`` leaves out, by their text."""
        self._lead, self._lead_text = self._find_lead(vocabulary)
        self.has_byte_tokens = "<0x0A>" in vocabulary
        """True if bytes are tokens: the decoder then outputs a whole run of them as invalid if its last character is
        incomplete."""
        self.eos: int | None = self._wrapper.eos_token_id
        self.bos: int | None = self._wrapper.bos_token_id
        self._remembered = lru_cache(_PARTS)(self.encode)
        self.piece = lru_cache(_PARTS)(self._describe_token)
        """Return the text of a single token, also of special ones; invalid bytes as ``token_id:`` and the id."""

        self.decode_token = lru_cache(_PARTS)(self._decode_token)
        """Return the same as ``decode_inner`` of one token, cached: a stream needs it for each of its tokens."""

        self.inner_piece = lru_cache(_PARTS)(self._inner_piece)
        """Return the same for a token within a text: with its space, which some decoders leave out at the beginning."""

    def check_length(self, text: str, context: int, field: str) -> None:
        """Raise ``PromptTooLong`` for a text that exceeds ``context`` tokens with any tokenization.

        Tokenizing the longest possible body first would take minutes of CPU time and gigabytes of memory.
        """
        most = context * self._longest
        if len(text) > most:
            raise PromptTooLong(f"{field} has {len(text)} characters; {context} tokens hold at most {most}", field)

    def encode(self, text: str, *, special: bool = False) -> TokenIds:
        """Return the token ids of a text; with ``special``, the tokenizer's special tokens are added."""
        if len(text) <= LONG_TEXT:
            return tuple(self._fast.encode(text, add_special_tokens=special).ids)
        # Only the batch call releases the GIL.
        return tuple(self._fast.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def encode_prompt(self, text: str) -> TokenIds:
        """Return the token ids of a whole prompt with special tokens (Llama and Gemma: BOS).

        If the text begins with that token already, as with a chat template, it is not added again.
        """
        ids = self.encode(text, special=True)
        return ids[1:] if ids[:2] == (self.bos, self.bos) else ids

    def encode_part(self, text: str) -> TokenIds:
        """Return the same as ``encode``, cached for the latest short texts."""
        return self._remembered(text) if len(text) <= LONG_TEXT else self.encode(text)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        generation_prompt: bool = True,
        template_kwargs: TemplateKwargs | None = None,
    ) -> TokenIds:
        """Return the token ids of chat messages rendered with the template.

        It contains all special tokens; plain continuation has those of any text."""
        if not self._wrapper.chat_template:
            raise InvalidRequest("the model has no chat template; give a plain text instead of messages", "messages")
        variables = dict(template_kwargs or {})
        if variables:
            check_template_variables(variables, self._wrapper.get_chat_template())
        try:
            with limit_rendering():
                text = self._wrapper.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=generation_prompt, **variables
                )
        except Exception as error:  # a template is a program and may raise anything
            raise InvalidRequest(f"the chat template refused the messages: {error}", "messages") from error
        return self.encode_prompt(text) if self._wrapper.chat_template == PLAIN_TEMPLATE else self.encode(text)

    def to_json(self) -> str:
        """Return the tokenizer as the JSON text that ``tokenizers`` reads."""
        text: str = self._fast.to_str()
        return text

    @property
    def chat_template(self) -> str:
        """The model's chat template; empty if it has none."""
        return self._wrapper.get_chat_template() if self._wrapper.chat_template else ""

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens, including special ones."""
        text: str = self._fast.decode(tokens, skip_special_tokens=False)
        return text

    def _find_lead(self, vocabulary: dict[str, int]) -> tuple[TokenIds, str]:
        """Return tokens, and their text, after which the decoder treats others as within a text.

        None if it treats the first token of a text as any other. SentencePiece's decoders leave out the first space.
        """
        lead = self.encode("a")
        text: str = self._fast.decode(lead, skip_special_tokens=True)
        others = {*self.encode("a b")[len(lead) :]}
        others.update(itertools.islice((id for word, id in vocabulary.items() if word.startswith("\u2581")), 2))
        for other in others:
            alone = self._fast.decode([other], skip_special_tokens=True)
            if text and self._fast.decode([*lead, other], skip_special_tokens=True) != text + alone:
                return lead, text
        return (), ""

    def _describe_token(self, token: int) -> str:
        text = self.decode_all([token])
        return f"token_id:{token}" if "\ufffd" in text else text

    def _decode_token(self, token: int) -> str:
        return self.decode_inner([token])

    def _inner_piece(self, token: int) -> str:
        before = self.encode("a")
        first, whole = self.decode_all(before), self.decode_all([*before, token])
        if "\ufffd" in whole or not whole.startswith(first):
            return self.piece(token)
        return whole.removeprefix(first)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens without special ones, but for delimiters of function calls.

        An incomplete character becomes U+FFFD.
        """
        return self._decode(tokens, is_inner=False)

    def decode_inner(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the same for tokens within a text: with the space of the first one, as after a prompt.

        ``special``: special tokens are part of the text.
        """
        if special:
            return self.decode_all([*self._lead, *tokens]).removeprefix(self._lead_text)
        return self._decode(tokens, is_inner=True) if self._lead else self.decode(tokens)

    def _decode(self, tokens: Sequence[int], *, is_inner: bool) -> str:
        if not self._shown or self._shown.keys().isdisjoint(tokens):
            return self._decode_run(tokens, is_inner=is_inner)
        parts: list[str] = []
        for shown, group in itertools.groupby(tokens, key=lambda token: self._shown.get(token)):
            run = list(group)
            is_later = is_inner or bool(parts)
            parts.append(self._decode_run(run, is_inner=is_later) if shown is None else shown * len(run))
        return "".join(parts)

    def _decode_run(self, tokens: Sequence[int], *, is_inner: bool) -> str:
        if not is_inner or not self._lead:
            text: str = self._fast.decode(tokens, skip_special_tokens=True)
            return text
        text = self._fast.decode([*self._lead, *tokens], skip_special_tokens=True)
        return text.removeprefix(self._lead_text)


def _leave_out_unembedded(tokenizer: Any, vocab: int, folder: Path) -> Any:
    """Return a tokenizer without the added tokens that have no embedding, such as that of pictures in Gemma 3 1B.

    Their text is an ordinary one then. A vocabulary that is larger without them, too, is that of another model.
    """
    unembedded = [token.content for index, token in tokenizer.get_added_tokens_decoder().items() if index >= vocab]
    if not unembedded or max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1) >= vocab:
        return tokenizer
    _log.warning(
        "%s: the model has no embedding of %s: as a text it is encoded as any other", folder, ", ".join(unembedded[:4])
    )
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < vocab]
    return type(tokenizer).from_str(json.dumps(content))
