"""Modules, biases and rows of tokens that an adapter brings in place of the base model's."""
