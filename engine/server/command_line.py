"""Command line of the engine server, built from ``EngineOptions``."""

from __future__ import annotations

import argparse
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from engine.gguf.template_setting import read_template
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError

_DEFAULT_DRAFT = "auto"
_LIMITS = {"ge": (operator.ge, "at least"), "gt": (operator.gt, "more than"), "le": (operator.le, "at most")}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.server.app", description="Serve models over OpenAI's completions API."
    )
    parser.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="NAME=PATH",
        help="A model to serve: a Hugging Face folder or a GGUF file.",
    )
    parser.add_argument(
        "--chat-template",
        action="append",
        default=[],
        metavar="NAME=TEMPLATE",
        help="A model's chat template instead of its own: a .jinja file, a text, or none for plain continuation.",
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="A LoRA adapter of the first model, a folder that PEFT has saved, to serve as a model of its own.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="The address to listen on (default: %(default)s).")
    parser.add_argument("--port", type=int, default=8100, help="The port; 0 takes a free one (default: %(default)s).")
    parser.add_argument("--uds", metavar="PATH", help="The Unix socket to listen on instead.")
    parser.add_argument(
        "--threads", type=_number_parser(int, {"ge": 1}), metavar="N", help="The number of threads of one step."
    )
    for option in fields(EngineOptions):
        name, metadata = f"--{option.name.replace('_', '-')}", option.metadata
        kind, help_text = metadata["kind"], metadata["help"].replace("%", "%%")
        if kind is bool:
            parser.add_argument(name, action="store_true", help=f"{help_text}.")
            continue
        if option.default is not None:
            help_text += " (default: %(default)s)"
        value: dict[str, Any] = {"metavar": metadata.get("metavar", "DRAFTER")}
        if "choices" in metadata:
            value = {"choices": metadata["choices"]}
        elif kind is not str:
            value = {"type": _number_parser(kind, metadata), "metavar": "N" if kind is int else "X"}
        parser.add_argument(name, default=option.default, help=f"{help_text}.", **value)
    parser.set_defaults(draft=_DEFAULT_DRAFT)
    return parser


def read_options(arguments: argparse.Namespace) -> EngineOptions:
    return EngineOptions(**{option.name: getattr(arguments, option.name) for option in fields(EngineOptions)})


def read_model_folders(models: Sequence[str]) -> dict[str, str]:
    """Return the folder of each model by name. Raises ``EngineError``."""
    folders: dict[str, str] = {}
    for model in models:
        name, equals, path = model.partition("=")
        if not (name and equals and path):
            raise EngineError(f"--model {model!r} must be NAME=PATH, such as policy=models/policy")
        if name in folders:
            raise EngineError(f"--model {name}=… is given twice")
        folders[name] = path
    return folders


def read_adapter_folders(values: Sequence[str]) -> dict[str, str]:
    """Return the folder of each adapter by name. Raises ``EngineError``."""
    folders: dict[str, str] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not (name and equals and path):
            raise EngineError(f"--adapter {value!r} must be NAME=FOLDER, such as judge=runs/judge")
        if name in folders:
            raise EngineError(f"--adapter {name}=… is given twice")
        folders[name] = path
    return folders


def read_templates(values: Sequence[str], models: Mapping[str, str]) -> dict[str, str]:
    """Return the chat template of each model that is given one. Raises ``EngineError``."""
    templates: dict[str, str] = {}
    for value in values:
        name, equals, template = value.partition("=")
        if not equals or name not in models:
            raise EngineError(f"--chat-template must be NAME=TEMPLATE with a name of --model: {', '.join(models)}")
        if name in templates:
            raise EngineError(f"--chat-template {name}=… is given twice")
        try:
            templates[name] = read_template(template)
        except EngineError as error:
            raise EngineError(f"--chat-template {name}=…: {error}") from None
    return templates


def _number_parser(kind: type, limits: Mapping[str, Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{value} must be finite")
        for limit, (is_within, phrase) in _LIMITS.items():
            if limit in limits and not is_within(value, limits[limit]):
                raise argparse.ArgumentTypeError(f"{value} must be {phrase} {limits[limit]}")
        return value

    parse.__name__ = kind.__name__  # shown by argparse for text that is no number
    return parse
