"""The suite as pytest tests: one line in a test file gives one test per property."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.testing.profiles import DEFAULT, Profile
from lora_backends.testing.report import failure_text
from lora_backends.testing.suite import properties, verify


def conformance_tests(
    backend: str | Callable[[], LoRABackend],
    device: torch.device | str | None = None,
    *,
    profile: Profile | str = DEFAULT,
    seed: int = 0,
) -> Callable[..., None]:
    """Return a pytest function, parametrised by property, to assign to a name of a test file.

        # test_conformance.py
        from lora_backends.testing import conformance_tests

        test_conformance = conformance_tests("my_backend", device="cpu")

    Args:
        backend: a registered name, or a function that makes the backend.
        device: where a backend given by name runs.
        profile: "default", "thorough", or sizes of your own.
        seed: from which all cases follow.

    Returns:
        A test function; a property that does not apply is skipped with its reason.
    """
    import pytest

    @pytest.mark.parametrize("name", list(properties()))
    def test_conformance(name: str) -> None:
        made: Any = backend if isinstance(backend, str) else backend()
        (result,) = verify(made, device, profile, seed, only=[name]).results
        if result.status == "not applicable":
            pytest.skip(result.reason)
        if result.status == "failed":
            # the trace ends inside the suite and hides the case
            pytest.fail(failure_text(result), pytrace=False)

    return test_conformance
