"""`generate` and continuous batching: checks of their options, and the manager of requests."""
