"""Numerical building blocks of the engine, each with a plain torch reference."""
