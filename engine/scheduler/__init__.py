"""Requests, sequences and the choice of each step's work.

``scheduler.Scheduler`` decides which tokens of which ``sequence.Sequence`` are computed next and reserves their pages.
``draft`` holds the draft tokens that a step may verify; ``timings`` counts waiting times and token intervals.
"""
