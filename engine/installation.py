"""The packages that ``pip install 'reasoner[engine]'`` adds, without which models run on other servers alone."""

from __future__ import annotations

from importlib.util import find_spec

from engine.protocol.types import EngineError

ENGINE_PACKAGES = ("torch", "transformers", "numba", "gguf", "safetensors", "matplotlib")
INSTALL = "pip install 'reasoner[engine]'"


def require_engine(purpose: str) -> None:
    """Raise ``EngineError`` unless the engine's packages are installed. ``purpose``: what needs them."""
    missing = next((name for name in ENGINE_PACKAGES if find_spec(name) is None), None)
    if missing is not None:
        raise EngineError(f"{purpose} needs the engine, and its package {missing!r} is not installed: {INSTALL}")
