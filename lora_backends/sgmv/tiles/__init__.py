"""Tile sizes: what they are, the rules, and measured tables."""
