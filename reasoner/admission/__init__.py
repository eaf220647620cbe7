"""Admission of jobs: turns a client's specification into a validated and resolved one.

``resolve.py`` is the entry point; ``validation.py`` holds the checks, ``defaults.py`` and ``effort.py`` the operator's
settings, ``calibration.py`` and ``model_checks.py`` the checks of files when a service starts.
"""
