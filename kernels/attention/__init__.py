"""Attention over a paged cache, and the write of keys and values into its pages."""
