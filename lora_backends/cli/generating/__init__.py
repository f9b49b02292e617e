"""What `generate` and `agree` run: their settings, adapters and model."""
