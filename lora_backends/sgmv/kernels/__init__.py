"""Device code of the Triton engines: entry kernels and the arithmetic that they share."""
