"""The rules of gradients: their values, relations between them, and how they are asked for."""

from lora_backends.testing.properties.gradients import (  # noqa: I001  the order of the report
    values,
    relations,
    calls,
    experts,
    sizes,
)

__all__ = ["calls", "experts", "relations", "sizes", "values"]
