"""Where csgmv runs: on the GPU, else in the interpreter."""

import pytest
from helpers import engines


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    engines.mark_gpu(items, __file__)


@pytest.fixture
def device():
    return engines.device_or_skip()
