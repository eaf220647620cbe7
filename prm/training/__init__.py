"""Training of verifiers on labelled steps: PRMs (``train``), adapters of the policy (``adapter``), probes (``probe``).

``loop`` has the steps, checkpoints, validation and export that PRMs and adapters share; ``data``, ``adapter_data`` and
``probe_data`` have their examples and batches.
"""
