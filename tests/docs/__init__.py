"""Tests of the documentation: its examples run, and what it names exists."""
