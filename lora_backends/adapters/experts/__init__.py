"""The LoRA of experts in checkpoints, in each layout that trainers save."""
