"""Random configurations and command lines, valid or spoilt."""
