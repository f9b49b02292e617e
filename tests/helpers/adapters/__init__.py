"""PEFT models, checkpoints and training steps."""
