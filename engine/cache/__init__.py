"""Paged key-value memory with a prefix tree."""
