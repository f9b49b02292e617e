"""Inputs and outputs of a forward pass that carry the state of one pass to the next.

Transformers has renamed its caches before, and models of others name theirs as they like. So no
list of caches is kept but one of the words that carry no state: any other word is a cache, or is
refused where a missed cache would change a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from lora_backends.errors import UnsupportedInputError

STATELESS = frozenset(
    """input_ids inputs_embeds attention_mask position_ids token_type_ids mm_token_type_ids
    moe_mm_token_type_ids cache_position labels logits_to_keep hidden_states per_layer_inputs
    decoder_input_ids decoder_inputs_embeds decoder_attention_mask decoder_position_ids
    encoder_outputs encoder_hidden_states encoder_attention_mask cross_attention_states
    cross_attention_mask head_mask cross_attn_head_mask decoder_head_mask global_attention_mask
    start_positions end_positions next_sentence_label sentence_order_label task_type_ids bbox langs
    lengths entity_ids entity_attention_mask entity_token_type_ids entity_position_ids perm_mask
    target_mapping input_mask padding_mask bool_masked_pos mask_time_indices input_shape_ids
    input_pronunciation_ids cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k seq_idx pixel_mask
    pixel_values pixel_values_videos pixel_values_images pixel_attention_mask image_grid_thw
    video_grid_thw image_sizes image_attention_mask image_position_ids image_embeds
    image_hidden_states image_token_pooling image_grids image_num_crops aspect_ratio_ids
    aspect_ratio_mask spatial_shapes target_sizes second_per_grid_ts mm_encoder_outputs
    visual_pos_masks deepstack_visual_embeds vision_feature_layer vision_feature_select_strategy
    input_features input_features_mask feature_attention_mask audio_feature_lengths input_values
    input_audio_embeds audio_embed_sizes audio_attention_mask input_mode""".split()
)
"""Words of models' `forward` for the tokens, images and sound of the pass itself, and for its form.

A word belongs here only if its value never depends on tokens of an earlier pass.
"""

RESULTS = frozenset(
    """hidden_states attentions cross_attentions encoder_hidden_states encoder_attentions
    decoder_hidden_states decoder_attentions router_logits encoder_router_logits
    decoder_router_logits image_hidden_states image_outputs video_outputs audio_outputs""".split()
)
"""Words of models' outputs for several tensors that are no state."""

_FLAGS = ("use_", "output_", "return_")
"""Prefixes of arguments that are switches, and carry no state."""


def past_tokens(inputs: Mapping[str, Any]) -> int:
    """Return how many tokens of each row came before a pass, where adapters differ by token.

    On a GPU it may wait for the device.

    Raises:
        UnsupportedInputError: an input may hold earlier tokens, and does not say how many; or two
            say different numbers.
    """
    counts = {name: _tokens_in(name, value) for name, value in carried(inputs).items()}
    if len({*counts.values()}) > 1:
        raise UnsupportedInputError(
            f"inputs hold different numbers of earlier tokens, and adapters differ by token\n"
            f"  given: {', '.join(f'{name}: {count}' for name, count in counts.items())}\n"
            f"  allowed: one cache\n  to do: use one adapter per row, or pass one of them"
        )
    return next(iter(counts.values()), 0)


def carried(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a pass that may hold a state, by name."""
    return {name: value for name, value in inputs.items() if _may_carry(name, value)}


def states_of(output: Any, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return the states that a pass hands to the next one, by the name of the argument.

    The pass was asked for a cache if the model's `forward`, which has `parameters`, takes
    `use_cache`.

    Raises:
        TypeError: it may hold a state, and the argument that takes it is not known.
    """
    takes = {
        name
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in STATELESS
        and not name.startswith(_FLAGS)
    }
    named = _named(output)
    # Transformers' outputs keep the earlier names of a cache as attributes.
    states = {
        name: value
        for name in takes
        if _may_carry(name, value := named.get(name, getattr(output, name, None)))
        and not callable(value)
    }
    # A state under a name that the model takes is enough: the rest are results.
    if states:
        return states
    others = [
        name
        for name, value in carried(named).items()
        if _is_cache(value)
        or (takes and name not in RESULTS and not isinstance(value, torch.Tensor))
    ]
    # A model that was asked for a cache (`use_cache`) and returns none has none.
    is_unasked = takes and named and "use_cache" not in parameters
    if others or is_unasked:
        raise TypeError(
            f"which of {', '.join(sorted(takes)) or 'its arguments'} takes a state is not known, "
            f"from an output of {', '.join(others or named)}"
        )
    return {}


def _may_carry(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool | float | str):  # an int may be a position
        return False
    return name not in STATELESS or _is_cache(value)


def _is_cache(value: Any) -> bool:
    return callable(getattr(value, "get_seq_length", None))


def _named(output: Any) -> Mapping[str, Any]:
    """Return the parts of an output by name. Alone or first in a tuple, a tensor is the result."""
    # A ModelOutput is a Mapping, too.
    if isinstance(output, Mapping):
        return output
    # Wrapped: an element without a name may be a state, even if it is a tensor.
    if isinstance(output, tuple | list):
        return {f"element {at} of a tuple": (x,) for at, x in enumerate(output) if at}
    return {} if isinstance(output, torch.Tensor) else vars(output)


def _tokens_in(name: str, value: Any) -> int:
    try:
        return int(value.get_seq_length())
    except Exception as error:  # there is no such method, or it fails
        raise UnsupportedInputError(
            f"{name} does not tell how many tokens of earlier passes it holds, and adapters differ "
            f"by token\n  given: {name} of type {type(value).__name__}\n"
            f"  allowed: a cache with get_seq_length(), and inputs that are known to hold no "
            f"earlier tokens, e.g. attention_mask\n"
            f"  to do: use one adapter per row, or leave {name} out (a cache: use_cache=False)"
        ) from error
