"""The engine of one process: models with their caches, and the thread that steps them.

``engine_core.EngineCore`` has the requests of one model, set up from ``EngineOptions``;
``step.StepRunner`` launches, commits and reads the steps that compute them;
``local_engine.LocalEngine`` runs the loops in one thread and offers them to event loops as an ``EngineClient``.
"""
