"""Text and tokens: the checkpoint's tokenizer, and incremental detokenization with stop strings."""
