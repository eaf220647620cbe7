"""Function calls: the tools that a job offers to a model, and the calls that the model writes.

The package knows nothing of jobs, engines or HTTP, so that the search, the answers and the API can all read calls with
it.
"""
