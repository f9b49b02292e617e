"""Where the rows of a batch lie in each module's input, and which modules take LoRA."""
