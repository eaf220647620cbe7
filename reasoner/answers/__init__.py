"""Answers: extracted from a solution's text, canonicalized, compared and counted as votes.

A solution without an answer belongs to no class of equivalent answers and has no vote.
"""
