"""Libraries that hold answers to JSON Schemas, compared: what they accept, what then passes, how long masks take."""
