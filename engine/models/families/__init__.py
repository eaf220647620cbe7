"""The architectures that are computed by code of our own, and the reading of their configs.

``table`` holds each as its differences from Llama. ``read`` turns a ``config.json`` into the ``config`` of a decoder,
and ``layers`` reads what differs from layer to layer. Import from the modules.
"""
