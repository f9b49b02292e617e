"""Random combinations of PEFT's features in mixed batches, each row against PEFT alone."""
