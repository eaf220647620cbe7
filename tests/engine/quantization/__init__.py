"""Tests of weights in fewer bits."""
