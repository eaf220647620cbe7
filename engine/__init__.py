"""The inference engine: paged KV with a prefix tree, continuous batching, exact seeded sampling."""
