"""LoRA adapters in PEFT's format, over weights of any format.

``config`` and ``checkpoint`` read an adapter's folder; ``products`` adds the updates of several adapters to a model's
products, each row its own; ``invocation`` finds where an activated adapter begins, and keeps the keys that adapters
have changed apart in the cache; ``judge`` has the tokens by which an adapter is asked as a verifier. Import from the
modules.
"""
