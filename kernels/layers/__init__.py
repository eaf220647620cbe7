"""The operators between matrix products: norms and gated activations."""
