"""A GGUF file's model in transformers, from its header as the package ``gguf`` reads it.

``reasoner engine --check`` compares the engine with it, so nothing of ``engine.gguf`` is used here but the names of
tensors: what our translation of the header gets wrong must show as a difference.
"""
