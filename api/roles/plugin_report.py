"""Lines about the strategies and verifiers of other packages, for the start of a service."""

from __future__ import annotations

from collections.abc import Mapping

from reasoner.jobs.verifier_specs import load_verifier_kinds
from reasoner.plugins import OWN_PACKAGE, list_unusable
from reasoner.strategies.registry import STRATEGY_PACKAGES


def describe_plugins() -> list[str]:
    """Return where strategies and verifiers came from; nothing where all are the service's own."""
    kinds = {kind: plugin.package for kind, plugin in load_verifier_kinds().items()}
    return [*_describe("strategies", STRATEGY_PACKAGES), *_describe("verifiers", kinds)]


def describe_unusable() -> list[str]:
    """Return a line for each plug-in that was left out."""
    load_verifier_kinds()
    return [str(plugin) for plugin in list_unusable()]


def _describe(what: str, packages: Mapping[str, str]) -> list[str]:
    others = [f"{name} of {package}" for name, package in packages.items() if package != OWN_PACKAGE]
    count = len(packages) - len(others)
    return [f"{what}: {count} of {OWN_PACKAGE}, {', '.join(others)}"] if others else []
