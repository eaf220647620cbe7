"""Suites in files, in the forms in which they are published: JSON Lines, CSV or Parquet; one module a form.

``registry`` is the entry point; a form is a ``FileFormat`` and one line there.
"""
