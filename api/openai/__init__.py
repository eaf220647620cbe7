"""OpenAI's routes: a job behind every completion and every response."""
