"""Try a chat template before a model is loaded: a template is a program, which may run or grow forever.

``check_template`` renders some conversations in a process of its own, whose processor time and memory are limited.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.protocol.types import EngineError

_SECONDS = 2
"""Processor time, hundreds of times of what templates take."""
_BYTES = 1 << 30
"""Address space of the process, interpreter included."""
_PATIENCE = 60.0
"""Seconds until the process is ended though it has not used its processor time."""
_GREETING = {"role": "user", "content": "Hello, how many are 2 and 2?"}
_TURN = [_GREETING, {"role": "assistant", "content": "They are 4."}]
_CONVERSATIONS = ([_GREETING], [{"role": "system", "content": "Be brief."}, _GREETING], _TURN * 20 + [_GREETING])


def check_template(template: str, subject: str) -> None:
    """Raise ``EngineError`` about ``subject`` if the chat template does not end, or takes too much memory."""
    command = [sys.executable, "-c", f"from {__name__} import render_all; render_all()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    try:
        done = subprocess.run(
            command, input=json.dumps(template), capture_output=True, text=True, timeout=_PATIENCE, env=environment
        )
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode:
        raise EngineError(
            f"{subject} is no usable template: a short conversation takes more than "
            f"{_SECONDS} seconds or {_BYTES >> 20} MB; it must end within milliseconds"
        )


def render_all() -> None:
    """Render the conversations with the template on standard input under the limits. A template that refuses them, such
    as one without system messages, is a good one.
    """
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: form}
    environment.filters["tojson"] = lambda value, **_: json.dumps(value)
    try:
        template = environment.from_string(json.load(sys.stdin))
    except (TemplateError, RecursionError):
        return  # it renders nothing at all
    for messages in _CONVERSATIONS:
        for prompt in (True, False):
            try:
                template.render(messages=messages, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>")
            except MemoryError:
                sys.exit(1)
            except Exception:  # a template may raise anything; a request that uses it is refused then
                continue


class _Generation(Extension):
    """transformers' tag around an assistant's words."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: Any) -> None:
    raise TemplateError(str(message))
