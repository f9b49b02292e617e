"""Backends that are wrong on purpose, each with the property that has to catch it.

Each is `torch_ref` with one fault of a kind that kernels have.
"""

from mutants import (
    arithmetic,
    edges,
    eight_bit,
    experts,
    experts_gradients,
    features,
    gradients,
    outputs,
    sizes,
    state,
    thresholds,
)
from mutants.base import MUTANTS, Mutant, TwoSteps

__all__ = [
    "MUTANTS",
    "Mutant",
    "TwoSteps",
    "arithmetic",
    "edges",
    "eight_bit",
    "experts",
    "experts_gradients",
    "features",
    "gradients",
    "outputs",
    "sizes",
    "state",
    "thresholds",
]
