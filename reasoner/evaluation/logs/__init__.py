"""Candidates that other tools have drawn and published: a file for each form of log, and one line in ``registry``.

A form turns its records into questions with candidates and right answers, as ``candidate_file`` has them.
"""
