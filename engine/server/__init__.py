"""HTTP server of the engine: OpenAI's completions API with extensions for branches, scoring, pins and token ids.

``app`` is the program (``python -m engine.server.app``), ``routes`` the API, ``schema`` its request bodies and
``openai`` its responses.
"""
