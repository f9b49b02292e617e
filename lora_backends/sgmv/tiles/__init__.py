"""Tile sizes: what they are, the rules, measured tables, and the search space of the tuner."""
