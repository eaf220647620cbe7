"""Connections of jobs to the configured engines, tenant isolation in their caches, and waking of waiting jobs."""
