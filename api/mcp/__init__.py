"""The Model Context Protocol, revision 2026-07-28 and those before it: tools that agents call, and their tasks.

``arguments`` and ``results`` are the tools' schemas, ``tools`` calls them on ``jobs``: of this process or of a service
behind HTTP. ``tasks`` is the extension of that name, ``server`` puts all of it together. ``endpoint`` serves it as
``/mcp``, where ``errors`` are JSON-RPC's; ``stdio`` serves it on standard input and output. Only these two import the
package ``mcp``, when they are used: it takes a second.
"""
