"""Norms and gated activations on the CPU."""
