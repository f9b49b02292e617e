"""`generate` and continuous batching, and which of their words are followed."""
