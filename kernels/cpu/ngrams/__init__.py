"""ngrams."""
