"""Accuracy against compute: run strategies on suites of problems and measure what each answer costs.

``plan`` says what runs, ``measure`` runs it, ``runs`` keeps the results, ``comparisons`` and ``report`` evaluate them.
``suites`` holds the problems, ``calibrate`` fits the table of the ``auto`` strategy. No worker imports this package.
"""
