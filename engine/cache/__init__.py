"""Paged KV cache with prefix sharing.

``pages`` counts the references to each page, ``radix_tree`` finds the pages of a cached prefix and evicts the least
recently used ones, ``pins`` pins the pages of a job against eviction, ``key_pool`` holds the tensors, and ``paged_kv``
the ``page_table`` of every running sequence. ``page_drops`` chooses the pages that a long thought loses, and
``retained`` keeps the tables of branches that lost some. Import from the modules.
"""
