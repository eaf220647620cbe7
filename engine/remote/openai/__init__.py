"""Client of OpenAI-compatible servers: vLLM, SGLang and others with the completions API.

``engine.py`` is the client; ``dialects.py`` says what each kind of server can do, ``request.py`` writes what it gets,
``answer.py`` reads what it sends, ``stream.py`` is one request.
"""
