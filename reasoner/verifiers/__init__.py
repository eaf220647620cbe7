"""Verifiers: each kind that a job may name, as a ``NodeScorer`` of its search (``registry.py`` opens it)."""
