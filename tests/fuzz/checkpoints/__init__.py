"""Random checkpoint folders, valid or damaged, against PEFT's own rules."""
