"""Every deliberately wrong backend fails the suite, and each property finds some fault."""

import pytest
from mutants import MUTANTS

from lora_backends.testing import properties, verify
from lora_backends.testing.properties import PROPERTIES
from lora_backends.testing.properties.core import cuda_graphs
from lora_backends.testing.suite import MACHINE

CRASHES = {"EmptyBatchCrashes"}
NOT_ON_THE_CPU = {name for name, prop in PROPERTIES.items() if cuda_graphs in prop.requires}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_fails_the_property_that_it_names(mutant):
    backend, only = mutant.backend("cpu"), [mutant.caught_by]
    for seed in range(5):  # what a seed draws depends on what else is imported
        report = verify(backend, only=only, shrink=False, seed=seed)
        if not report.passed:
            break
    (failure,) = report.failures
    # a mutant that crashes would prove nothing about the arithmetic
    assert ("raised at" in failure.failure.message) == (mutant.name in CRASHES)


def test_there_are_at_least_25_mutants():
    assert len(MUTANTS) >= 25


def test_every_property_catches_a_mutant():
    assert {mutant.caught_by for mutant in MUTANTS.values()} == set(properties()) - NOT_ON_THE_CPU


def test_the_machine_is_the_last_property():
    assert list(properties())[-1] == MACHINE.name
