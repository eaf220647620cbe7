"""The formats of public process reward models: how each reads a question and its steps, and where its score is."""
