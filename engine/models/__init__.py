"""Decoder models over the paged key-value memory, and the reading of their checkpoints."""
