"""Training data from the trees of jobs: ``formats`` names the kinds of rows and makes them from a ``recorded_job``;
``conversations`` has those with messages, ``steps`` those of process reward models, ``rollouts`` those with tokens.
``labels`` says which solutions are right, ``selection`` which jobs are wanted, ``rows`` the columns, and ``parquet``
writes them as Parquet.

Modules import what they need from the submodules; nothing is exported here.
"""
