"""The models that write: their choice among those served, their shares, and the delimiters of their thoughts."""
