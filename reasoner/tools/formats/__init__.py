"""Formats in which models write function calls, one module each.

A model learned one format in its training, and its chat template shows which. ``registry.find_format`` finds it by
marks in the template, ``ToolFormat.parse`` reads the calls of a finished text, and ``stream.CallStream`` those of a
text that is still being written. Both run the same reader, so they cannot disagree.
"""
