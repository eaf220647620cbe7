"""Sampling of tokens from logits: logits processors, and the samplers of the CPU and of a GPU."""
