"""Search with a verifier: what scoring costs, beside scoring whole solutions and beside plain transformers."""
