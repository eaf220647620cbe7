"""The engine of one process: models with their caches, and the thread that steps them.

``engine_core.EngineCore`` is the step loop of one model, set up from ``EngineOptions``;
``local_engine.LocalEngine`` runs the loops in one thread and offers them to event loops as an ``EngineClient``.
"""
