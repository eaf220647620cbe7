"""Decoder models over the paged KV cache, and the loading of their checkpoints.

``load`` opens a checkpoint folder: ``families`` and ``decoder`` define the Llama-family architectures, ``recurrent``,
``latent`` and others what differs from them, and ``by_transformers`` runs every other causal language model of
transformers. ``prediction`` reads
a checkpoint's layer for multi-token prediction. ``interface`` is what the engine calls. Import from the modules.
"""
