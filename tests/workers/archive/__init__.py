"""Tests of the archive: its database, and moving jobs there."""
