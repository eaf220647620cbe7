"""Answers: found in a solution's text, brought to a form in which equal ones are equal, and voted on.

A solution without an answer abstains: it is in no class and has no vote.
"""
