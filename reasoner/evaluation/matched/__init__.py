"""Strategies at equal budgets: every strategy may spend the same amount of one quantity on each problem.

``plan`` lists the runs, ``measure`` executes them, ``replay`` lets strategies that decide on independent samples spend
each budget on one pool of samples, ``results`` compares, ``chart`` and ``page`` draw, ``report`` writes the files.
"""
