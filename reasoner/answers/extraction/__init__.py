"""Extraction of the answer from the text of a solution; ``extract.py`` and ``finder.py`` are the entry points."""
