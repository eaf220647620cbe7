"""Process reward models: scores for single reasoning steps.

``formats/`` implements the input formats of public models, ``scorers/`` scores through an engine client without torch,
``rollouts/`` labels steps by sampling, ``training/`` trains a model on such labels, ``evaluate.py`` implements
ProcessBench's protocol. ``python -m prm`` is the process of ``reasoner prm train``.
"""
