"""Random and fixed cases of the kit, their inputs, and Hypothesis strategies for them."""
