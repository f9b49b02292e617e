"""Names that users write outside of Python code."""

TILES_FOLDER_VARIABLE = "LORA_BACKENDS_TILES"
"""The environment variable that names the user's folder of tile-size tables."""
