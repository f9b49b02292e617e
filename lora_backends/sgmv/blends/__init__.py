"""Several adapters per token in two launches, whatever their number, for both Triton engines."""
