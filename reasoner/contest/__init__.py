"""Contests: a list of problems under shared tokens and a shared time, on one engine, that survive any kill.

``problems.py`` reads the list; ``token_pool.py`` shares the tokens by expected gain; ``file_journal.py`` keeps each
problem's search; ``contest.py`` runs all of it; ``answers.py`` writes what is known; ``report.py`` says what was spent,
what was right, and what more time would buy.
"""
