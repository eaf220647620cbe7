"""Causal language models that transformers' code computes, over our cache.

``model`` runs such a model, ``attention`` takes the place of its attention, and ``states`` that of the caches of its
recurrent layers. Import from the modules.
"""
