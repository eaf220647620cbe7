"""Suites of problems with exact checks: two bundled families, files in the formats of GSM8K and MATH, reasoning-gym.

``registry`` is the entry point.
"""
