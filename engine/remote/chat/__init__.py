"""Client of servers that only chat: OpenAI, OpenRouter, gateways, and others with ``/v1/chat/completions``."""
