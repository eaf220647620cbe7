"""Paged KV cache with prefix sharing.

``pages`` counts the references to each page, ``radix_tree`` finds the pages of a cached prefix and evicts the least
recently used ones, ``pins`` pins the pages of a job against eviction, and ``paged_kv`` holds the tensors and the page
table of every running sequence. ``page_drops`` chooses the pages that a long thought loses, and ``retained`` keeps the
tables of branches that did. Import from the modules.
"""
