"""The search of one job: branches on the engine, under a budget and through the journal.

``search.py`` holds ``Search``, the interface that strategies program against. Below it: ``stream.py`` (branches that
arrive one by one), ``branch_runner.py`` (engine requests within the budget), ``generation.py`` (one branch, with its
state), ``rules/`` (what cuts or extends its text), ``score_recorder.py`` and ``scoring.py`` (verifiers), ``replay.py``
(the journal), ``grants.py`` (shared budgets).
"""
