"""Gradients: calls that autograd records, their backward, and both in traced programs."""
