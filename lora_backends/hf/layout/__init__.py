"""Sites for LoRA in a base model, and the place of the batch's rows in their inputs."""
