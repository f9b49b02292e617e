"""The conformance suite as tests of this package: one per property."""

from lora_backends.testing import conformance_tests

test_gather = conformance_tests("gather", device="cpu")
