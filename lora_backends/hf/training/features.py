"""The features of PEFT's LoRA with which an adapter can be trained; others are refused by name."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from lora_backends.adapters import Checkpoint
from lora_backends.errors import UnsupportedInputError, shown

_UNTRAINED = {
    "alora_invocation_tokens": "it acts from a marker inside the prompt on (aLoRA)",
    "arrow_config": "a router mixes several adapters",
    "ensure_weight_tying": "it ties the LoRA of the embedding and the head",
    "kasa_config": "it truncates the base weight",
    "layer_replication": "it repeats layers of the base model",
    "lora_bias": "the stacks hold it multiplied by the scaling",
    "megatron_config": "its layers are split over Megatron's ranks",
    "modules_to_save": "it trains copies of whole modules of the base model",
    "monteclora_config": "it samples weights in each step",
    "target_parameters": "it adapts parameters of experts or routers",
    "trainable_token_indices": "it trains rows of the embedding",
    "use_bdlora": "its matrices are block-diagonal",
    "use_dora": "the stacks hold the magnitude divided by a norm (DoRA)",
    "use_qalora": "the input is pooled into groups",
    "velora_config": "it compresses what the backward reads",
}
"""Fields of a configuration, and why an adapter with them is not trained."""

_STARTS = frozenset({"gaussian", "orthogonal"})
"""Names of PEFT's initialisations that read no base weights and change none."""

_LOADED_STARTS = _STARTS | {"eva"}
"""The same of a saved adapter, whose start is over; the others go on to change its forward."""


def check_config(values: Mapping[str, Any], source: object, *, is_new: bool) -> None:
    """Raise UnsupportedInputError, which names every feature that cannot be trained as in PEFT."""
    # `is_new`: it is yet to be initialised
    refused = [*_refused_fields(values), *_refused_start(values, is_new)]
    if refused:
        raise _refusal(source, refused)


def check_checkpoint(checkpoint: Checkpoint, routers: Container[str]) -> None:
    """Raise UnsupportedInputError, which names every part of an adapter that is not trained."""
    refused = [f"LoRA of experts at {path}" for path in list(checkpoint.experts)[:3]]
    if checkpoint.own or checkpoint.own.tying is not None:
        refused.append("modules of its own (modules_to_save, biases, tokens or an invocation)")
    for path, delta in checkpoint.modules.items():
        parts = {
            "a LoRA bias (lora_bias)": delta.bias is not None,
            "a magnitude (DoRA)": delta.magnitude is not None,
            f"init_lora_weights = {shown(delta.init)}": delta.init is not None,
            "LoRA of a router": path in routers,
        }
        refused += [f"{part} at {path}" for part, is_given in parts.items() if is_given]
    if refused:
        raise _refusal(checkpoint.folder, refused[:8])


def _refused_fields(values: Mapping[str, Any]) -> Iterator[str]:
    for key, reason in _UNTRAINED.items():
        if values.get(key) not in (None, False, [], {}) or _is_switched_on(key, values.get(key)):
            yield f"{key} = {shown(values[key])}: {reason}"
    if values.get("bias", "none") != "none":
        yield f"bias = {shown(values['bias'])}: it trains biases of the base model"


def _is_switched_on(key: str, value: Any) -> bool:
    """Return whether a configuration within the configuration is given, an empty one too."""
    return value == {} and key.endswith(("_config", "use_bdlora"))


def _refused_start(values: Mapping[str, Any], is_new: bool) -> Iterator[str]:
    start, known = values.get("init_lora_weights", True), _STARTS if is_new else _LOADED_STARTS
    if isinstance(start, str) and start.lower() not in known:
        yield (
            f"init_lora_weights = {shown(start)}: it reads or changes the base weights, or trains "
            f"a part alone; allowed: true, false or {', '.join(sorted(known))}"
        )


def _refusal(source: object, refused: list[str]) -> UnsupportedInputError:
    return UnsupportedInputError(
        f"{source} uses features that cannot be trained here\n  given: "
        + "\n         ".join(refused)
        + "\n  allowed: LoRA of linear layers and of the token embedding, with rank_pattern, "
        "alpha_pattern, use_rslora and lora_dropout\n"
        "  to do: leave them out, or train this adapter with PEFT"
    )
