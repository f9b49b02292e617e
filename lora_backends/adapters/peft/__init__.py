"""PEFT's checkpoints: the configuration, the names of tensors, and the promises of a file."""
