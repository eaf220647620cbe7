"""The public formats of quantised checkpoints, one module each; see ``registry``.

``create_reader`` returns the reader for a ``quantization_config``. ``pack_matrix`` returns the tensors of a matrix,
and ``build_config`` the ``quantization_config`` that describes them.
"""
