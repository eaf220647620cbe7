"""The engine's speed beside its peers': same checkpoint, same prompts, same machine, runs interleaved."""
