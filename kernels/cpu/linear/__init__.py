"""Matrix products on the CPU with weights that are packed once: float32, int8, and int4 in groups."""
