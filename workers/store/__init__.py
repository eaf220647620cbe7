"""Jobs, batches, files and API keys in Redis.

Each change of a job is one of the Lua scripts in ``lua/``. ``jobs.JobStore`` is the entry point; ``batches``, ``files``
and ``keys`` work on its connection.
"""
