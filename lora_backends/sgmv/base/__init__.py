"""A base layer's product with few rows, beside which its LoRA runs."""
