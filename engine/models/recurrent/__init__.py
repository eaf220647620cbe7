"""Decoders of architectures in which some or all layers keep a state of fixed size instead of keys."""
