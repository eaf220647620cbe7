"""The models of a job: what a client submits (``spec``, ``verifier_specs``, ``rule_specs``, ``batch``), what it gets
back (``job``, ``event``), and the journal that a search writes. All but the journal are part of the REST schema.

Modules import what they need from the submodules; nothing is exported here.
"""
