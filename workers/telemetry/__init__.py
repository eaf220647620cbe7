"""Structured logs and OpenTelemetry traces."""
