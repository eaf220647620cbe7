"""Structured logs (``logs``) and OpenTelemetry traces (``tracing``) of all roles."""
