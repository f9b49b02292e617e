"""The backward of dense layers in Triton: one launch for dh, dx, dlora_a and dlora_b each."""
