"""Anthropic-compatible routes: Messages and the count of their tokens, with a job behind every message.

``body``: what a client sends, with its blocks in ``content``, its tools in ``tools`` and what is not supported in
``unsupported``. ``turns``: the conversation for the model. ``message``: a message as one object. ``events``: a message
as a stream, and the content of both. ``job``: the job of a request. ``errors``: errors and headers in Anthropic's
format.
"""
