"""Constrained sampling."""
