"""Random calls of the interface, forward and backward, against float64."""
