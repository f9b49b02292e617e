"""The product of few rows with a base layer's weight, which overlaps the layer's LoRA."""
