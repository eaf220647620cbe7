"""Generator of the documentation's sources: ``python -m docs.generate`` writes ``build/docs``, which Zensical renders.

Hand-written pages are copied, with links that leave ``docs/`` rewritten. Reference pages come from the code: HTTP
interfaces from OpenAPI, the command line from typer, settings, strategies and verifiers from pydantic models, metrics
from their collectors. Nothing of this is committed.
"""
