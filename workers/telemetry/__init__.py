"""Structured logs (``logs``) and OpenTelemetry traces of all roles (``tracing``).

``search_spans`` makes the spans of an ended job of its events, with its texts (``span_content``) if that is allowed,
and ``span_export`` exports them.
"""
