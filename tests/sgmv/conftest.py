"""The Triton engines, each with every kind of segment, on the GPU or else in the interpreter."""

from functools import partial

import pytest
from helpers import engines


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    engines.mark_gpu(items, __file__)


@pytest.fixture
def device():
    return engines.device_or_skip()


@pytest.fixture(params=engines.VARIANTS)
def make(device, request):
    """Return a function from options to an engine."""
    return partial(engines.make_engine, request.param, device)


@pytest.fixture
def backend(make):
    return make()
