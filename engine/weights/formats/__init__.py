"""The public formats of quantised checkpoints, one module each, which reads and writes it; see ``registry``."""
