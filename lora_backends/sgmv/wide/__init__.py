"""The operands of a base product that computes its layer's LoRA too, one launch for each."""
