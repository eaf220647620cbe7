"""Chat Completions: body, answer, and the route ``POST /v1/chat/completions``."""
