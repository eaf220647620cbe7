"""Weights in fewer bits: making them, writing them in the public checkpoint formats, and reading those."""
