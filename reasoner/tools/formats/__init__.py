"""Formats in which models write function calls, one module each.

A model learned one format in its training, and its chat template shows which. ``registry.find_format`` finds it by
marks in the template, and ``ToolFormat.parse`` reads the calls of a finished text.
"""
