"""Branches in flight on OpenAI-compatible servers, whichever of the two protocols they speak.

``engine.py`` is the base of their clients, ``running.py`` a generate request until its end, ``stream.py`` the request
to the server for one or several of its branches, with its retries, and ``answer.py`` the part of a branch that has
arrived.
"""
