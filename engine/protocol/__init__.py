"""The interface between an engine and its clients: requests, results, errors, options, and their JSON.

Free of torch, so that services and workers may import it.
"""
