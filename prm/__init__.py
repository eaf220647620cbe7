"""Process reward models: scores for single reasoning steps."""
