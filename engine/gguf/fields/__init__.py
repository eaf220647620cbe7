"""Fields of ``config.json`` that families of architectures have, from the metadata of a GGUF file."""
