"""Scorers on served models: process reward models, outcome reward models and language models as judges. No torch."""
