"""Sizes beyond those that are drawn, alone, in pairs and with every option."""

from lora_backends.testing.properties.sizes import experts, layers  # the order of the report

__all__ = ["experts", "layers"]
