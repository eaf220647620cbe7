"""Process reward models: scores for single reasoning steps.

``formats/`` reads public models as they were trained, ``scorers/`` scores through an engine's client without torch,
``rollouts/`` labels steps by sampling, ``training/`` trains a model on such labels, ``evaluate.py`` is ProcessBench's
protocol. ``python -m prm`` is the process of ``reasoner prm train``.
"""
