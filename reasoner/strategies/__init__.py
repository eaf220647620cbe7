"""Search strategies: decision logic on a ``Search``, each with a pydantic model of its parameters.

``registry.py`` lists them by name. ``sampling/`` holds those that complete solutions, ``tree/`` those that search step
by step; ``auto.py`` chooses among them by the difficulty of the question.
"""
