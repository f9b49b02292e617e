"""The rules that every backend keeps, one function each, in the order in which they run."""

from lora_backends.testing.properties import (  # noqa: I001  the order of the report
    results,
    values,
    relations,
    algebra,
    gradients,
    plans,
    room,
    layers,
    factors,
    errors,
    experts,
    sizes,
    device,
)
from lora_backends.testing.properties.core import PROPERTIES, Property

__all__ = [
    "PROPERTIES",
    "Property",
    "algebra",
    "device",
    "errors",
    "experts",
    "gradients",
    "factors",
    "layers",
    "plans",
    "relations",
    "results",
    "room",
    "sizes",
    "values",
]
