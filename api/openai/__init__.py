"""OpenAI-compatible routes: Chat Completions and Responses, with a job behind every answer.

Both share the request fields, the narration that becomes the reasoning text, usage, errors in OpenAI's shape and the
handling of connections.
"""
