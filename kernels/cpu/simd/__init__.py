"""Vectors of sixteen float32 inside kernels, and the loops over them that attention needs."""
