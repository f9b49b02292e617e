"""PEFT's checkpoints: the configuration, the names of tensors, and what a file promises."""
