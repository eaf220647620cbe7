"""Tools of a model: Python that a branch runs while it reasons, and calls of the client's functions (``formats``).

The package knows nothing of jobs, engines or HTTP, so that the search, the answers and the API can all use it.
"""
