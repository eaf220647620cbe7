"""Admission of jobs: a specification as a client sent it goes in, a checked and resolved one comes out.

``resolve.py`` does all of it; ``validation.py`` holds the checks, ``defaults.py`` and ``effort.py`` what an operator
configures, ``calibration.py`` and ``model_checks.py`` the checks of files at a service's start.
"""
