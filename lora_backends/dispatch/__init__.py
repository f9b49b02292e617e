"""The way from a public method to an engine's: trace, check, look for a cached call, run."""
