"""Small diffusion pipelines, and LoRAs for them."""
