"""Generator of the documentation: ``python -m docs.generate``, the first step of ``make docs``.

It writes what comes from elsewhere into the committed pages of ``docs/``: reference pages from the code (HTTP
interfaces from OpenAPI, the command line from typer, settings, strategies and verifiers from pydantic models, metrics
from their collectors), tables from ``benchmarks/results``, diagrams. Then it copies all pages to ``build/docs``, which
Zensical renders, with links that leave ``docs/`` rewritten.
"""
