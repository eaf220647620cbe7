"""Accuracy against compute: run strategies on suites of problems and measure what each answer costs.

``plan`` lists the runs, ``measure`` executes them, ``runs`` stores the results, ``comparisons`` and ``report`` evaluate
them; ``matched`` does so at equal budgets. ``suites`` holds the problems, ``calibrate`` fits the table of the ``auto``
strategy. No worker imports this package.
"""
