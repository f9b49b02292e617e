"""Features that a backend may have, and names in `LoRABackend.features`.

A call that needs another feature is refused by name. A backend that has only the methods of the
interface has none of them.
"""

from __future__ import annotations

CAPACITY = "capacity"
"""`prepare_batch` takes `capacity`; a refill has any number of tokens up to it."""

SLICE_TENSORS = "slice_tensors"
"""lora_a and lora_b may be tuples of one tensor per slice (`LoRAWeights.a_of` and `b_of`)."""

TOKEN_SCALES = "token_scales"
"""The delta of a token is multiplied by its entry of `LoRAPlan.token_scales`."""

OUTPUT_SCALES = "output_scales"
"""The sum of base_output and delta is multiplied by `LoRAWeights.output_scales`."""

EIGHT_BIT = "eight_bit"
"""lora_a and lora_b may be int8, float8_e4m3fn or float8_e5m2, with scales."""

FEATURES = (CAPACITY, SLICE_TENSORS, TOKEN_SCALES, OUTPUT_SCALES, EIGHT_BIT)
