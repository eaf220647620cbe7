"""Engine speed compared with other engines: same checkpoints, prompts and machine, with interleaved runs."""
