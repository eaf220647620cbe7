"""Layers that keep a state of fixed size: the gated delta rule, and short convolutions, with references in torch."""
