"""EAGLE-3: ``config`` reads the two formats of published heads, ``head`` computes their layer."""
