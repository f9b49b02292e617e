"""Two launches that add any number of adapters per token, for both Triton engines."""
