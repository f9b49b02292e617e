"""Checks that the hooks work under a configuration of continuous batching."""

from __future__ import annotations

import copy

import torch
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown

CPU_BLOCKS, CPU_BATCH_TOKENS = 64, 256
"""Blocks of the cache, and tokens of a batch, on a CPU if the caller sets neither. Transformers
would give the cache 0.6 of the free memory."""


def checked(
    config: ContinuousBatchingConfig | None, device: torch.device
) -> ContinuousBatchingConfig:
    """Return a copy of a configuration, with defaults under which the hooks work.

    Args:
        config: the caller's; None: Transformers' defaults.
        device: of the model.

    Raises:
        InvalidInputError: `config` has another type.
        UnsupportedInputError: it asks for CUDA graphs or asynchronous batching.
    """
    config = ContinuousBatchingConfig() if config is None else copy.deepcopy(config)
    if not isinstance(config, ContinuousBatchingConfig):
        raise InvalidInputError(
            f"continuous_batching_config is {shown(config)}\n  allowed: a ContinuousBatchingConfig"
        )
    # One flag, or one for each kind of pass.
    graphs = config.use_cuda_graph
    if any(graphs) if isinstance(graphs, (tuple, list)) else graphs:
        raise _not_followed("use_cuda_graph", "a graph replays without the hooks")
    if config.use_async_batching:
        raise _not_followed("use_async_batching", "two batches would share one plan")
    # None lets Transformers choose, and it may choose a graph.
    config.use_cuda_graph = config.use_async_batching = False
    # A shared block has keys and values of one adapter.
    config.allow_block_sharing = False
    if device.type == "cpu":
        config.num_blocks = config.num_blocks or CPU_BLOCKS
        config.max_batch_tokens = config.max_batch_tokens or CPU_BATCH_TOKENS
    return config


def check_resolved(config: ContinuousBatchingConfig) -> None:
    """Refuse a configuration that Transformers has completed with compilation.

    Raises:
        UnsupportedInputError: it compiles the model.
    """
    if config.varlen_compile_config is not None or config.decode_compile_config is not None:
        raise _not_followed("a compile configuration", "the plans change with every batch")


def _not_followed(option: str, reason: str) -> UnsupportedInputError:
    return UnsupportedInputError(
        f"continuous batching with adapters cannot use {option}: {reason}\n"
        f"  allowed: a ContinuousBatchingConfig without it"
    )
