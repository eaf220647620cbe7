"""Tokenizer, chat template and context size of a model folder, for servers that exchange text only. Free of torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from engine.protocol.own_sampling import read_own_sampling
from engine.protocol.template_limit import limit_rendering
from engine.protocol.template_variables import check_template_variables
from engine.protocol.types import EngineError, InvalidRequest, TemplateKwargs, TokenIds, TokenizeRequest
from engine.remote.model_size import count_parameters

_CLASSIFIERS = ("TokenClassification", "SequenceClassification", "ForProcessRewardModel", "ForPrmModel")
"""Endings of the names of architectures that output labels instead of tokens."""


class LocalTokenizer:
    """Tokenizer of a model folder, read from its JSON files and its chat template."""

    def __init__(self, folder: Path) -> None:
        """Raises ``EngineError`` if a required file is missing or invalid."""
        from tokenizers import Tokenizer  # only needed for servers other than ours

        self.folder = folder
        try:
            self._fast: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises plain ``Exception``
            raise EngineError(f"{folder} has no loadable tokenizer.json: {error}") from error
        self._settings = _read_json(folder / "tokenizer_config.json")
        self.template = chat_template(folder)
        config = _read_json(folder / "config.json")
        self.context: int | None = config.get("max_position_embeddings")
        self.parameters = count_parameters(folder)
        self.vocab_size: int = config.get("vocab_size") or self._fast.get_vocab_size()
        self.architecture = str(next(iter(config.get("architectures") or []), ""))
        is_classifier = self.architecture.endswith(_CLASSIFIERS)
        self.kind: Literal["generate", "classify"] = "classify" if is_classifier else "generate"
        self.notes: dict[str, object] = {name: value for name, value in config.items() if name.startswith("reasoner_")}
        generation = folder / "generation_config.json"
        self.sampling = read_own_sampling(_read_json(generation), generation)
        first = self._settings.get("bos_token")
        if first is None and "added_tokens_decoder" not in self._settings:  # the form used by older checkpoints
            first = _read_json(folder / "special_tokens_map.json").get("bos_token")
        self.bos: int | None = self._fast.token_to_id(first["content"] if isinstance(first, dict) else first or "")

    def tokenize(self, request: TokenizeRequest) -> TokenIds:
        """Return the token ids of a text or of rendered chat messages."""
        if isinstance(request.text, str):
            return self.encode(request.text, special=request.special)
        chat = self.chat(
            request.text, generation_prompt=request.generation_prompt, template_kwargs=request.template_kwargs
        )
        return self.encode(chat)

    def encode(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        """Return the token ids of a text; with ``special``, the tokenizer's special tokens are added."""
        return tuple(self._fast.encode(text, add_special_tokens=special).ids)

    def piece(self, token: int) -> str:
        """Return the text of a single token, as servers name it in lists of log-probabilities."""
        text: str = self._fast.decode([token], skip_special_tokens=False)
        return text

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens, including special ones. Raises ``InvalidRequest`` if they end inside a
        character.
        """
        text: str = self._fast.decode(list(tokens), skip_special_tokens=False)
        if "\ufffd" in text:
            raise InvalidRequest("the server takes texts only, and these tokens end within a character", "prompt")
        return text

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        generation_prompt: bool = True,
        template_kwargs: TemplateKwargs | None = None,
    ) -> str:
        """Render chat messages with the model's template."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self.template is None:
            raise InvalidRequest("the model has no chat template; give a plain text instead of messages", "messages")
        variables = dict(template_kwargs or {})
        check_template_variables(variables, self.template)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        special = {name: value for name, value in self._settings.items() if name.endswith("_token")}
        try:
            with limit_rendering():
                return environment.from_string(self.template).render(
                    messages=list(messages), add_generation_prompt=generation_prompt, **special | variables
                )
        except (TemplateError, TimeoutError) as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", "messages") from error


@functools.lru_cache(maxsize=8)
def load_tokenizer(folder: Path) -> LocalTokenizer:
    """Return the tokenizer of a folder, which all clients of a process share: reading one takes up to a second."""
    return LocalTokenizer(folder)


def chat_template(folder: Path) -> str | None:
    """Return a checkpoint's chat template, the default one if it has several; ``None`` if it has none.

    Raises ``EngineError`` for an invalid file.
    """
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = _read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _refuse(message: str) -> None:
    raise InvalidRequest(f"the chat template refused the messages: {message}", "messages")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise EngineError(f"{path} is not a JSON object")
    if not isinstance(value.get("architectures") or [], list):
        raise EngineError(f"{path}: architectures is {value['architectures']!r:.80}; it must be a list of names")
    return value
