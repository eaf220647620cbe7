"""Sampling of tokens from logits: logits processors, truncation, and the samplers of the CPU and of a GPU."""
