"""Paged KV cache with prefix sharing.

``pages`` counts the references to each page, ``radix_tree`` finds the pages of a cached prefix and evicts the least
recently used ones, ``pins`` pins the pages of a job against eviction, and ``paged_kv`` holds the tensors and the page
table of every running sequence. Import from the modules.
"""
