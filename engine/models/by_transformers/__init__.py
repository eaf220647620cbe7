"""Causal language models that transformers' code computes, over our cache.

``model`` runs such a model, ``attention`` takes the place of its attention, and ``states`` that of its recurrent layers'
caches. Import from the modules.
"""
