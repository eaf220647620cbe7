"""Layouts of quantised weights, one class in a module each, with the products that compute with them.

``engine.weights.matrix`` defines what a class provides. Import from the modules.
"""
