"""Norms and gated activations on the CPU: ``norm`` and ``activation``, each in one pass over a row."""
