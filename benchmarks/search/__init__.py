"""Search with a verifier: the cost of scoring, compared with scoring whole solutions and with plain transformers."""
