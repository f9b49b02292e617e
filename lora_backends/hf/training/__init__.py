"""Training of adapters: many of one model in one batch."""
