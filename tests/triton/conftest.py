"""Where the Triton backend runs: on the GPU, else in the interpreter."""

from pathlib import Path

import pytest
import torch

from lora_backends.triton import TritonBackend, launch

ON_GPU = torch.cuda.is_available() and not launch.INTERPRETED


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """Mark what runs on the GPU here, so that `-m gpu` finds it."""
    for item in items:
        here = item.path.is_relative_to(Path(__file__).parent)
        if ON_GPU and here and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device():
    if ON_GPU:
        return torch.device("cuda", torch.cuda.current_device())
    if launch.INTERPRETED:
        return torch.device("cpu")
    pytest.skip("Triton needs a GPU, or TRITON_INTERPRET=1 set before the import")


@pytest.fixture
def backend(device):
    return TritonBackend(device)
