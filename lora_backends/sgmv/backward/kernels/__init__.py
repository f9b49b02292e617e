"""Device code of the backward of dense layers."""
