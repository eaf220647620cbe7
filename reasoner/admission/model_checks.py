"""Checks of model folders before they are served, from the config and the tokenizer, without weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

from engine.protocol.types import EngineClient, EngineError, ModelInfo, TokenizeRequest, Tokens
from engine.remote.local_tokenizer import LocalTokenizer, chat_template
from prm.formats.registry import FORMAT_NOTE, find_format
from prm.scorers.outcome import is_outcome_model
from prm.scorers.steps import StepScorer

_SETTING = (
    "name one as chat_template in its table [models.NAME], which may be 'none' for a base model: plain continuation"
)


def check_policy(folder: Path, template: str | None = None) -> None:
    """Raise ``EngineError`` for a model that cannot generate solutions. ``template``: the one in the settings."""
    if template is not None or chat_template(folder) is not None:
        return
    from engine.gguf.folder import TEMPLATE, weight_files  # takes half a second to import

    if files := weight_files(folder):
        raise EngineError(
            f"{files[0]} has no chat template, and questions are asked as chat messages: put the template of the "
            f"model that it was made from beside it, as {files[0].with_name(TEMPLATE)}, {_SETTING}, or take the "
            "instruction-tuned variant"
        )
    raise EngineError(
        f"{folder} has no chat template, and questions are asked as chat messages: give it a chat_template.jinja "
        f"or a chat_template in tokenizer_config.json, {_SETTING}, or take the model's instruction-tuned variant"
    )


def is_language_model(folder: Path) -> bool:
    """Return True for a model that writes text and is not known to score steps."""
    text = LocalTokenizer(folder)
    info = ModelInfo(
        "",
        text.kind,
        context=0,
        vocab_size=text.vocab_size,
        parameters=0,
        extra=text.notes,
        architecture=text.architecture,
    )
    return text.kind == "generate" and find_format(info) is None


def check_prm(folder: Path, name: str, format_name: str | None, template: str | None = None) -> None:
    """Raise ``EngineError`` for a model that cannot score steps.

    ``format_name`` and ``template`` are its format and its chat template in the settings.
    """
    tokenizer = _FolderTokenizer(folder, template)
    text = tokenizer.text
    extra = text.notes | ({} if format_name is None else {FORMAT_NOTE: format_name})
    info = ModelInfo(
        name,
        text.kind,
        context=0,
        vocab_size=text.vocab_size,
        parameters=0,
        extra=extra,
        architecture=text.architecture,
        bos=text.bos,
    )
    if is_outcome_model(info):
        raise EngineError(
            f"model {name!r} scores finished solutions, not steps: serve it by an engine of its own, whose address is "
            "another one of REASONER_ENGINE_URL, and let jobs name it in a verifier of kind 'outcome'"
        )
    scorer = StepScorer(cast(EngineClient, tokenizer), info)  # uses the tokenizer methods alone
    asyncio.run(scorer.encode_question([{"role": "user", "content": "?"}]))


class _FolderTokenizer:
    """The tokenizer methods of an ``EngineClient``, on a model folder.

    Chat templates are not rendered, since that needs transformers; the engine checks them.
    """

    def __init__(self, folder: Path, template: str | None) -> None:
        self.text = LocalTokenizer(folder)
        self._has_template = template is not None or self.text.template is not None
        self._folder = folder

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        if isinstance(request.text, str):
            return self.text.encode(request.text, special=request.special)
        if not self._has_template:
            raise EngineError(f"{self._folder} has no chat template, and its format asks as chat messages")
        return ()
