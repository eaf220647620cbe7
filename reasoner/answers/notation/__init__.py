"""Parsing of units, number words, dates and numbers in groups."""
