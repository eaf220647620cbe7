"""Attention over the paged cache on the CPU: the plan of a step, the write of keys and values, and attention itself."""
