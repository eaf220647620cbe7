"""The domain: jobs, budgets, the search tree, strategies, answers, suites."""
