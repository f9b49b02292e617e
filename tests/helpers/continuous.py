"""Small caches, prompts and calls that end, for tests of continuous batching."""

import dataclasses
import threading
from concurrent.futures import Future

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.generation.configuration_utils import ContinuousBatchingConfig


def needs(version, reason):
    """Return the mark of a test that an older Transformers cannot pass."""
    is_older = Version(transformers.__version__) < Version(version)
    return pytest.mark.skipif(is_older, reason=f"needs transformers>={version}: {reason}")


needs_pause = needs("5.18", "a pause")
keeps_sdpa = needs("5.19", "SDPA stays in place while a manager runs")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head")


def settings(**changes):
    """Return a small cache, so that a test neither waits nor needs memory."""
    sizes = {"num_blocks": 24, "max_batch_tokens": 7, **changes}
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    sizes["page_size" if "page_size" in known else "block_size"] = 8  # the name in older versions
    if "auto_switch_to_flash" in known:
        sizes["auto_switch_to_flash"] = False
    return ContinuousBatchingConfig(**sizes)


def prompts(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(1, 40, (n,), generator=generator).tolist() for n in lengths]


def begun(call, *args):
    """Begin a call in a thread, which does not keep the tests from ending."""
    found = Future()

    def run():
        try:
            found.set_result(call(*args))
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found


def soon(call, *args):
    """Return what a call returns, or fail where it waits for ever."""
    return begun(call, *args).result(timeout=30)
