"""The reference of what each kind of server can do, and which strategies run on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from docs.generate.tables import code, table
from engine.protocol.types import Capability, SamplingParams
from engine.remote.chat.options import SETTINGS, ChatOptions
from engine.remote.openai.dialects import DIALECTS
from reasoner.jobs.sampling_spec import Sampling
from reasoner.strategies.base import Strategy

_ALL_SETTINGS = [field.name for field in fields(SamplingParams)]


@dataclass(frozen=True, slots=True)
class _Server:
    name: str
    capabilities: frozenset[Capability]
    keeps_tenants_apart: bool
    settings: frozenset[str]
    """The fields of ``SamplingParams`` that it takes."""


def page(strategies: Mapping[str, Strategy[Any]]) -> str:
    """Return the page."""
    servers = _list_servers()
    settings = [name for name in _ALL_SETTINGS if name in Sampling.model_fields]
    capabilities = [(each.description, *(_mark(each in one.capabilities) for one in servers)) for each in Capability]
    tenants = ("keeps tenants' cached prefixes apart", *(_mark(server.keeps_tenants_apart) for server in servers))
    parameters = [(code(name), *(_mark(name in server.settings) for server in servers)) for name in settings]
    runs = {
        name: tuple(_mark(strategy.list_needs() <= server.capabilities) for server in servers)
        for name, strategy in strategies.items()
    }
    alike = [
        (", ".join(code(name) for name, other in runs.items() if other == marks), *marks)
        for marks in dict.fromkeys(runs.values())
    ]
    head = [server.name for server in servers]
    return "\n".join(
        [
            "# Servers\n",
            "What a search can do depends on the server of its model, whose kind is found by asking it, or named by "
            "`kind` in its table `[engines.NAME]`. A job that needs more is refused when it is posted, with the "
            "servers that can do it. `GET /v1/models` lists a model's `capabilities`, and what its server `lacks`. "
            "`openai` is any other server of OpenAI's completions, `chat` one of chats alone; *chat, continuing* is "
            'one with `prefill = "continue_final_message"`.\n',
            "## Capabilities\n",
            table(("the server", *head), [*capabilities, tenants]),
            "## Strategies\n",
            "By the needs of the strategy alone; a verifier, a constraint, tools and penalties have their own.\n",
            table(("strategy", *head), alike),
            "## Sampling parameters\n",
            "A job with a parameter that its server does not take is refused by name, and none is left out silently.\n",
            table(("parameter", *head), parameters),
        ]
    )


def _list_servers() -> list[_Server]:
    servers = [_Server("reasoner", frozenset(Capability), True, frozenset(_ALL_SETTINGS))]
    servers += [_Server(one.name, one.capabilities, one.salts, one.settings) for one in DIALECTS.values()]
    for name, options in (("chat", ChatOptions()), ("chat, continuing", ChatOptions(prefill="continue_final_message"))):
        servers.append(_Server(name, options.capabilities, False, frozenset(SETTINGS)))
    return servers


def _mark(is_there: bool) -> str:
    return "yes" if is_there else "–"
