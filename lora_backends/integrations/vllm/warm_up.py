"""Runs vLLM's LoRA layers before it serves, so that their kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lora_backends.integrations import warm_up as common
from lora_backends.integrations.vllm import experts, operation, plugin
from lora_backends.integrations.vllm.layers import AdoptedLayer
from lora_backends.integrations.vllm.methods import FIRST, SECOND, replace
from lora_backends.integrations.warm_up import Trial


def follow() -> None:
    """Let vLLM compile before it measures the free memory for caches, and after it has captured.

    vLLM also runs the model before it loads any adapter.
    """
    for module, owner in (("gpu_worker", "Worker"), ("cpu_worker", "CPUWorker")):
        place = f"vllm.v1.worker.{module}", owner
        replace(*place, "determine_available_memory", _warm_up_first, is_optional=True)
    for module in (FIRST, SECOND):
        replace(module, "GPUModelRunner", "capture_model", _warm_up_after, is_optional=True)


def _warm_up_first(original: Callable[..., Any], worker: Any) -> Any:
    common.warm_up(_trials(worker.model_runner), plugin.logger())
    memory = original(worker)
    _run_once(worker.model_runner)
    return memory


def _run_once(runner: Any) -> None:
    """Run the model on one token if vLLM has not run it, as on CPUs with LoRA.

    The run shows which layers the model calls; `Targets` refuses LoRA of the others.
    """
    lora = getattr(runner, "lora_manager", None)
    wrappers = () if lora is None else lora._adapter_manager.punica_wrapper_mapping.values()
    if wrappers and not any(getattr(wrapper, "was_run", True) for wrapper in wrappers):
        runner._dummy_run(1, is_profile=True)


def _warm_up_after(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    memory = original(runner, *args, **kwargs)
    common.warm_up_captured(_trials(runner), plugin.logger())
    return memory


def _trials(runner: Any) -> list[Trial]:
    """Return a trial of every LoRA layer of a model runner."""
    lora = getattr(runner, "lora_manager", None)
    if lora is None:
        return []
    manager = lora._adapter_manager  # a `LoRAModelManager`, which has made its layers
    return [
        trial
        for module in manager.modules.values()
        for trial in _trials_of(module, manager.max_num_seqs)
    ]


def _trials_of(module: Any, most_requests: int) -> Iterator[Trial]:
    layers = getattr(module, "lora_backends_layers", None)
    if not layers:
        return
    wrapper = module.punica_wrapper
    plans, dtype = wrapper.tokens, wrapper.model_dtype
    if experts.is_experts(module):
        top_k = module.moe_config.experts_per_token
        kind = ("experts", top_k, *map(_kind, layers))
        yield Trial(plans, plans.most_rows, experts.trial(plans, layers, top_k, dtype), kind)
        return
    layer: AdoptedLayer = layers[0]
    name, most = operation.LINEAR, plans.most_rows
    if layer.table is not None:
        name = operation.TOKENS
    elif _is_head(module):
        name, plans = operation.LOGITS, wrapper.sampled
        most = min(most_requests, plans.most_rows)
    call, kind = operation.trial(layer, plans, name, dtype), (name, _kind(layer.weights))
    yield Trial(plans, most, call, kind, pads=layer.table is not None)


def _is_head(module: Any) -> bool:
    """Return whether a layer runs on the sampled rows; a head of every token does not."""
    if hasattr(module, "full_weight_stacked"):  # a classification head
        return not hasattr(module, "get_output_num_labels")
    return hasattr(module, "sharded_to_full_mapping")


def _kind(weights: Any) -> tuple[Any, ...]:
    """Return a key of everything in a layer that selects its kernels."""
    a, b = (
        None if stack is None else (stack[0] if isinstance(stack, tuple) else stack)
        for stack in (weights.lora_a, weights.lora_b)
    )
    strides = tuple(None if each is None else each.stride()[-2:] for each in (a, b))
    has_factors = getattr(weights, "output_scales", None) is not None
    return (
        weights.output_slices,
        weights.max_rank,
        weights.in_features,
        weights.dtype,
        strides,
        has_factors,
    )
