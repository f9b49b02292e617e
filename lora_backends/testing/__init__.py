"""The conformance kit: the rules of a backend as properties, strategies and assertions.

``verify("my_backend")`` runs all of it; it needs ``pip install lora-backends[test]``.
"""

from lora_backends.testing.assertions import assert_close, assert_same_bits, assert_same_values
from lora_backends.testing.cases.dense import EDGES, LoRACase
from lora_backends.testing.cases.expert_strategies import expert_cases
from lora_backends.testing.cases.experts import EXPERT_EDGES, ExpertCase, ExpertInputs
from lora_backends.testing.cases.inputs import GuardedOutput, LoRAInputs
from lora_backends.testing.cases.kinds import case_from
from lora_backends.testing.cases.strategies import lora_cases, token_slots
from lora_backends.testing.expert_gradient_oracle import expected_expert_gradients
from lora_backends.testing.expert_oracle import expected_experts
from lora_backends.testing.gradient_oracle import expected_gradients
from lora_backends.testing.oracles import (
    Expected,
    expected_embedding,
    expected_expand,
    expected_linear,
    expected_shrink,
    rounded_exactly,
)
from lora_backends.testing.profiles import DEFAULT, THOROUGH, Profile
from lora_backends.testing.properties import Property
from lora_backends.testing.pytest_suite import conformance_tests
from lora_backends.testing.report import Failure, PropertyResult, Report
from lora_backends.testing.suite import check_case, properties, verify

__all__ = [
    "DEFAULT",
    "EDGES",
    "EXPERT_EDGES",
    "THOROUGH",
    "Expected",
    "ExpertCase",
    "ExpertInputs",
    "Failure",
    "GuardedOutput",
    "LoRACase",
    "LoRAInputs",
    "Profile",
    "Property",
    "PropertyResult",
    "Report",
    "assert_close",
    "assert_same_bits",
    "assert_same_values",
    "case_from",
    "check_case",
    "conformance_tests",
    "expected_embedding",
    "expected_expand",
    "expected_expert_gradients",
    "expected_experts",
    "expected_gradients",
    "expected_linear",
    "expected_shrink",
    "expert_cases",
    "lora_cases",
    "properties",
    "rounded_exactly",
    "token_slots",
    "verify",
]
