"""Strategies and verifiers of other packages, which they declare as entry points.

A plug-in that cannot be used is left out with its reason: jobs that do not need it must run all the same. So is one
whose name is taken. A name of this package is never replaced, and of two packages that use one name neither wins, since
which one did would depend on what else is installed, and jobs are run again after an update.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Generic, TypeVar

STRATEGIES_GROUP = "reasoner.strategies"
VERIFIERS_GROUP = "reasoner.verifiers"
OWN_PACKAGE = "reasoner"
"""The source of what is not a plug-in."""

T = TypeVar("T")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class PluginError(Exception):
    """An entry point that cannot be used, with the reason."""


@dataclass(frozen=True, slots=True)
class Plugin(Generic[T]):
    """A usable plug-in; ``package`` is its distribution with the version."""

    name: str
    package: str
    value: T


@dataclass(frozen=True, slots=True)
class UnusablePlugin:
    """A plug-in that was left out."""

    group: str
    name: str
    package: str
    reason: str

    def __str__(self) -> str:
        kind = "strategy" if self.group == STRATEGIES_GROUP else "verifier"
        return f"{kind} {self.name!r} of the package {self.package} is left out: {self.reason}"


_unusable: list[UnusablePlugin] = []


def load_plugins(group: str, own: Collection[str], read: Callable[[object], tuple[str, T]]) -> list[Plugin[T]]:
    """Return the usable plug-ins of a group by name.

    ``read`` checks what an entry point names and returns it with its name; it raises ``PluginError``. ``own`` are the
    names of this package. Plug-ins that are left out are listed by ``list_unusable``.
    """
    plugins: list[Plugin[T]] = []
    for point in sorted(_scan()[group], key=lambda point: (_describe_package(point), point.name, point.value)):
        package = _describe_package(point)
        try:
            name, value = read(_load(point))
            if not _NAME.fullmatch(name):
                raise PluginError(f"{name!r} is no name: lower-case letters, digits and _, at most 64")
            if name in own:
                raise PluginError(f"the name {name!r} is Reasoner's own: choose another one")
        except PluginError as error:
            _unusable.append(UnusablePlugin(group, point.name, package, str(error)))
        else:
            plugins.append(Plugin(name, package, value))
    counts = Counter(plugin.name for plugin in plugins)
    for plugin in plugins:
        if counts[plugin.name] > 1:
            packages = " and ".join(other.package for other in plugins if other.name == plugin.name)
            reason = f"{packages} use the same name: uninstall all but one of them"
            _unusable.append(UnusablePlugin(group, plugin.name, plugin.package, reason))
    return [plugin for plugin in plugins if counts[plugin.name] == 1]


def list_unusable() -> list[UnusablePlugin]:
    """Return the plug-ins that were left out until now."""
    return list(_unusable)


def explain_unusable(group: str) -> str:
    """Return the end of an error about an unknown name of a group: which plug-ins are not there, and why."""
    reasons = [str(plugin) for plugin in _unusable if plugin.group == group]
    return "".join(f"; {reason}" for reason in reasons)


@cache
def _scan() -> Mapping[str, EntryPoints]:
    """Scan the installed packages once for both groups, since that takes some hundredths of a second."""
    points = entry_points()
    return {group: points.select(group=group) for group in (STRATEGIES_GROUP, VERIFIERS_GROUP)}


def _load(point: EntryPoint) -> object:
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # an import runs any code of the package
        raise PluginError(f"{point.value} cannot be imported: {type(error).__name__}: {error}") from error


def _describe_package(point: EntryPoint) -> str:
    return "unknown" if point.dist is None else f"{point.dist.name} {point.dist.version}"
