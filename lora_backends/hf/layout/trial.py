"""Trial inputs that show where the modules of a model have the rows: text, images or sound.

The letters of a row name its values: rows of different letters share none, and "ac" begins as "a".
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from lora_backends.hf.calls.cache import states_of
from lora_backends.hf.layout.quantized_base import embedding_size
from lora_backends.hf.layout.sites import token_embedding_of

LENGTH, SHARED = 5, 3
"""Tokens per row, and those at the beginning of a row that the row "ac" has in common with "a"."""

PIXELS = 224
"""Height and width of images for models that name none: they take any, some of 32 or more."""

FRAMES = 8
"""Frames of sound that a convolutional encoder gives at least."""


@dataclass(frozen=True)
class TrialInputs:
    """The passes of one model.

    Its modules see tokens of text where `length` is not None: a flat axis may have all of them.
    """

    length: int | None  # tokens per row
    values: Mapping[str, Mapping[str, torch.Tensor]]  # of each input by its name, by row
    flags: Mapping[str, Any]
    parameters: Mapping[str, inspect.Parameter]  # of the model's forward

    def prompt(self, rows: Sequence[str]) -> dict[str, Any]:
        """Return the inputs of the first pass."""
        return {
            name: torch.stack([values[row] for row in rows])
            for name, values in self.values.items()
            if not name.startswith("next ")
        } | dict(self.flags)

    def fixed_random_numbers(self) -> AbstractContextManager[None]:
        """Give each block the same random numbers, and restore the caller's generator after it."""
        # some models draw random numbers in eval mode
        device = next(iter(next(iter(self.values.values())).values())).device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])

    def step(self, rows: Sequence[str], output: Any) -> dict[str, Any] | None:
        """Return the inputs of a pass with one token per row after the first one, or None.

        Raises:
            TypeError: the output may hold a state, and it is not known how the model takes it.
        """
        states = states_of(output, self.parameters)
        if not states:
            return None
        step = {**states, **self.flags}
        for key, values in self.values.items():
            if key.startswith("next "):
                step[key.removeprefix("next ")] = torch.stack([values[row] for row in rows])
        if "encoder_outputs" in self.parameters:
            state = output.encoder_last_hidden_state
            step["encoder_outputs"] = BaseModelOutput(last_hidden_state=state)
        return step


def trial_of(base: nn.Module) -> TrialInputs:
    """Return the trial passes of a model.

    Raises:
        TypeError: it takes neither text nor images nor sound that is known here.
    """
    parameters = inspect.signature(base.forward).parameters
    flags: dict[str, Any] = {
        name: True for name in ("use_cache", "return_dict") if name in parameters
    }
    main = tried_input(base)
    config: Any = getattr(base, "config", None)
    decodes = "decoder_input_ids" in parameters
    values: dict[str, Mapping[str, torch.Tensor]] = {}
    if main == "input_ids":
        tokens = _tokens(base)
        values[main] = {row: ids[:LENGTH] for row, ids in tokens.items()}
        if not decodes:
            values["next input_ids"] = {row: ids[LENGTH:] for row, ids in tokens.items()}
            return TrialInputs(LENGTH, values, flags, parameters)
        eos = getattr(config, "eos_token_id", None)
        if isinstance(eos, int):  # a classifier reads the state of the last one
            values[main] = {
                row: torch.cat([ids[: LENGTH - 1], ids.new_tensor([eos])])
                for row, ids in tokens.items()
            }
        values["decoder_input_ids"] = dict(values[main])
    else:
        values[main] = _noise(_shape(main, config), next(base.parameters()))
        if decodes:
            tokens = _tokens(base)
            values["decoder_input_ids"] = {row: ids[:LENGTH] for row, ids in tokens.items()}
    if decodes:
        values["next decoder_input_ids"] = {row: ids[LENGTH:] for row, ids in tokens.items()}
    return TrialInputs(None, values, flags, parameters)


def tried_input(base: nn.Module) -> str:
    """Return the name of the input that the trial passes of a model give its first modules."""
    parameters = inspect.signature(base.forward).parameters
    if "input_ids" in parameters and "decoder_input_ids" not in parameters:
        return "input_ids"
    return getattr(base, "main_input_name", "input_ids")


def _tokens(base: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tokens of every kind of row, one more than `LENGTH`."""
    embedding = token_embedding_of(base)
    size = embedding_size(embedding)
    if embedding is None or size is None:
        raise TypeError(f"{type(base).__name__} has no token embedding")
    # An end or a pad token may change masks, and with them other rows.
    special = _special_tokens(getattr(base, "config", None))
    plain = [token for token in range(size[0]) if token not in special]
    # Fixed, so that every wrapper of a model finds the same layouts.
    generator = torch.Generator("cpu").manual_seed(0)
    places = [  # at every place, another token for every letter
        torch.randperm(len(plain), generator=generator, device="cpu")[:4].tolist()
        for _ in range(LENGTH + 1)
    ]
    a, b, c, d = ([plain[place[letter]] for place in places] for letter in range(4))
    rows = {"a": a, "b": b, "ac": a[:SHARED] + c[SHARED:], "d": d}
    device = next(base.parameters()).device  # a packed embedding may have buffers alone
    return {name: torch.tensor(row, device=device) for name, row in rows.items()}


def _special_tokens(config: Any) -> set[int]:
    """Return ids that a model may treat unlike others, from its configuration and those inside."""
    special: set[int] = set()
    for key, value in (vars(config) if config is not None else {}).items():
        if hasattr(value, "model_type"):
            special |= _special_tokens(value)
        elif key.endswith(("token_id", "token_index")):
            special.update(value if isinstance(value, list) else [value])
    return special


def _noise(shape: tuple[int, ...], like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return values of every kind of row, drawn apart."""
    generator = torch.Generator("cpu").manual_seed(0)
    return {
        row: torch.randn(shape, generator=generator, device="cpu").to(like.device, like.dtype)
        for row in ("a", "b", "ac", "d")
    }


def _shape(main: str, config: Any) -> tuple[int, ...]:
    """Return the shape of one row of images or sound."""
    known = hasattr(config, "image_size") or hasattr(config, "num_channels")
    if main == "pixel_values" and known:
        size = getattr(config, "image_size", PIXELS)
        sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
        return (getattr(config, "num_channels", 3), *sides)
    if main == "input_features" and hasattr(config, "max_source_positions"):  # Whisper
        return (config.num_mel_bins, 2 * config.max_source_positions)
    if main == "input_values" and hasattr(config, "conv_stride"):  # wav2vec 2.0 and its like
        return (math.prod(config.conv_stride) * FRAMES + sum(config.conv_kernel),)
    if main == "input_values" and hasattr(config, "num_mel_bins"):  # spectrograms
        return (config.max_length, config.num_mel_bins)
    raise TypeError(f"no trial input of the kind {main} is known")
