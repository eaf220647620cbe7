"""OpenAI-compatible routes: Chat Completions and Responses, with a job behind every answer.

Both share the request fields, usage, errors in OpenAI's format, tools and formats of answers.
"""
