"""`adapter_config.json`: which modules have LoRA, with which rank and scaling.

Everything that `base(x) + scaling * (B A x + b)` cannot reproduce exactly is refused by its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lora_backends.adapters.files.formats import CONFIG_FILE, check_pointer
from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.files.messages import as_json, problem
from lora_backends.adapters.peft.pissa import INITS_FROM_BASE
from lora_backends.common.files import read_bytes
from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown

ALL_LINEAR = "all-linear"
Rank = Annotated[int, Field(gt=0, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Alpha = Annotated[float, Field(gt=-3e38, lt=3e38)]  # within float32


def _off_if_null(value: object) -> object:
    return False if value is None else value


# Trainers write null for an option left out (axolotl's fan_in_fan_out). PEFT reads it as off.
Switch = Annotated[bool, BeforeValidator(_off_if_null)]


class PeftLoraConfig(BaseModel):
    """The fields of `adapter_config.json` that decide what the adapter computes."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    peft_type: str
    r: Rank = 8
    lora_alpha: Alpha = 8
    use_rslora: Switch = False
    use_dora: Switch = False
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Alpha] | None = None
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    lora_bias: Switch = False
    fan_in_fan_out: Switch = False
    bias: Literal["none", "all", "lora_only"] = "none"
    init_lora_weights: Annotated[bool | str, BeforeValidator(_off_if_null)] = True
    ensure_weight_tying: Switch = False
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[TokenId] | dict[str, list[TokenId]] | None = None
    alora_invocation_tokens: list[TokenId] | None = None
    task_type: str | None = None
    peft_version: object = None  # that saved it; anything may stand there

    def is_of_peft(self, major: int, minor: int) -> bool:
        """Return whether the file says that this version of PEFT or a later one saved it."""
        match = re.match(r"(\d{1,6})\.(\d{1,6})", str(self.peft_version))
        return match is not None and (int(match[1]), int(match[2])) >= (major, minor)


ALLOWED = {
    "peft_type": '"LORA"',
    "r": "an integer above 0",
    "lora_alpha": "a finite number",
    "rank_pattern": "an object of names or regular expressions to integers above 0, or null",
    "alpha_pattern": "an object of names or regular expressions to finite numbers, or null",
    "target_modules": f'a list of module names, a regular expression or "{ALL_LINEAR}"',
    "target_parameters": "a list of names of parameters, or null",
    "exclude_modules": "a list of module names, a regular expression or null",
    "layers_to_transform": "an integer, a list of integers or null",
    "layers_pattern": "a regular expression, a list of them or null",
    "alora_invocation_tokens": "a list of token ids, or null",
    "bias": '"none"',
    "init_lora_weights": "true, false, a name or null",
    "modules_to_save": "a list of module names, or null",
    "task_type": "a string or null",
    "trainable_token_indices": "a list of token ids, an object of names to such lists, or null",
}
_ALLOWED_ELSE = "true, false or null"

# Fields that change training, saving or memory only. VeLoRA and MonteCLoRA alter the forward pass
# of training alone; the configurations of initialisations act only through init_lora_weights.
# ms-swift adds the dtype and the learning rates that it trains with (lora_dtype, lorap_*).
_HARMLESS = frozenset(
    """auto_mapping base_model_name_or_path corda_config eva_config inference_mode loftq_config
    lora_dropout lora_dtype lora_ga_config lorap_emb_lr lorap_lr_ratio megatron_core
    monteclora_config qalora_group_size revision runtime_config velora_config""".split()
)

# Refused where the value is not empty.
_REFUSED = {
    "alora_invocation_tokens": "the update starts at a marker inside the prompt",
    "layer_replication": "it repeats layers of the base model",
    "megatron_config": "its layers are split over Megatron's ranks",
    "modules_to_save": "it replaces whole modules of the base model",
    "trainable_token_indices": "it replaces rows of the embedding",
    "use_qalora": "the input is pooled into groups",
}

# Parts besides LoRA: refused where nothing runs them, see `read_checkpoint`.
_OWN = frozenset({"alora_invocation_tokens", "modules_to_save", "trainable_token_indices"})

# Refused where the value is an object, an empty one too: its defaults already switch them on.
_REFUSED_IF_SET = {
    "arrow_config": "a router mixes several adapters",
    "kasa_config": "it truncates the base weight and puts a diagonal between B and A",
    "use_bdlora": "its matrices are block-diagonal and stored packed",
}

_NOT_WITH_DORA = ("lora_bias", "monteclora_config", "target_parameters", "velora_config")

_PLAIN_INITS = frozenset({"eva", "gaussian", "mica", "orthogonal"})

# PEFT loads LoRA-GA on the untouched base, which is not the model that was trained.
_INITS_REFUSED = {
    "lora_ga": "training took its start off the base weights, and the file does not hold it; "
    "save_pretrained with path_initial_model_for_weight_conversion writes one that does",
}

_OF_MLX = {"fine_tune_type", "lora_layers", "lora_parameters"}
"""Keys by which mlx-lm's own adapter_config.json is known."""


def read_config(path: Path, limits: LoadLimits, own_modules: bool = False) -> PeftLoraConfig:
    """Read `adapter_config.json`, or say why its adapter cannot be reproduced exactly.

    With `own_modules` the caller takes the parts of the adapter that are not LoRA.

    Returns:
        The fields that decide what the adapter computes.

    Raises:
        InvalidInputError: no file, no JSON object, a wrong type or fields that contradict.
        UnsupportedInputError: features beyond plain LoRA; the message names every one.
    """
    return checked_config(read_json_object(path, limits), path, own_modules)


def checked_config(values: dict[str, Any], path: Path, own_modules: bool = False) -> PeftLoraConfig:
    """Return the configuration in a JSON object; refuse one that cannot be reproduced exactly.

    Raises:
        InvalidInputError: a wrong type, or fields that contradict.
        UnsupportedInputError: features beyond plain LoRA; the message names every one.
    """
    if "peft_type" not in values and _OF_MLX & values.keys():
        what = "it is the configuration of an adapter of MLX, not of PEFT"
        given = f"keys {', '.join(sorted(_OF_MLX & values.keys()))}"
        to_do = "convert the adapter to PEFT's format"
        raise UnsupportedInputError(problem(path, what, given, ALLOWED["peft_type"], to_do))
    if values.get("peft_type", "LORA") != "LORA":
        raise UnsupportedInputError(
            problem(
                path,
                f"peft_type {as_json(values['peft_type'])} is another method than LoRA",
                f"peft_type = {as_json(values['peft_type'])}",
                ALLOWED["peft_type"],
                "merge the adapter into its base model",
            )
        )
    config = _validated(values, path)
    _check_dora(values, config, path)
    refused = [
        *_refused_keys(values, own_modules),
        *_refused_values(config, own_modules),
        *unknown_keys(values),
    ]
    if refused:
        raise UnsupportedInputError(
            problem(
                path,
                "the adapter uses features that this library cannot reproduce exactly",
                refused,
                "LoRA that computes base(x) + scaling * (B A x + b)",
                "merge the adapter into its base model, or train it without these features",
            )
        )
    _check_consistency(config, path)
    return config


def read_json_object(path: Path, limits: LoadLimits) -> dict[str, Any]:
    """Return the JSON object in a file; InvalidInputError if there is none."""
    to_do = "pass the folder that PEFT's save_pretrained wrote"
    content = read_bytes(path, limits.header_bytes, limits.config_too_large)
    check_pointer(path, content)
    try:
        values = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        what = f"{CONFIG_FILE} is not readable JSON"
        given = f"{type(error).__name__}: {shown(str(error))}"
        raise InvalidInputError(problem(path, what, given, "a JSON object", to_do)) from error
    if not isinstance(values, dict):
        what = f"{CONFIG_FILE} holds no JSON object"
        given = f"a JSON {type(values).__name__}"
        raise InvalidInputError(problem(path, what, given, "a JSON object", to_do))
    return values


def _validated(values: dict[str, Any], path: Path) -> PeftLoraConfig:
    try:
        return PeftLoraConfig.model_validate(values)
    except ValidationError as error:
        keys = list(dict.fromkeys(str(fault["loc"][0]) for fault in error.errors()))
    given = [f"{key} = {as_json(values[key])}" if key in values else f"no {key}" for key in keys]
    allowed = "; ".join(f"{key} is {ALLOWED.get(key, _ALLOWED_ELSE)}" for key in keys)
    raise InvalidInputError(
        problem(path, f"wrong value of {', '.join(keys)}", given, allowed, "correct the file")
    )


def _refused_keys(values: Mapping[str, Any], own_modules: bool) -> Iterator[str]:
    for key, reason in _REFUSED.items():
        if values.get(key) and not (own_modules and key in _OWN):
            yield f"{key} = {as_json(values[key])}: {reason}"
    for key, reason in _REFUSED_IF_SET.items():
        if values.get(key) not in (None, False):
            yield f"{key} = {as_json(values[key])}: {reason}"


def _refused_values(config: PeftLoraConfig, own_modules: bool) -> Iterator[str]:
    init = config.init_lora_weights
    taken = own_modules and init in INITS_FROM_BASE and not config.use_dora
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS and not taken:
        reason = "loading it changes the base weights, or it is not known"
        reason = _INITS_REFUSED.get(init.lower(), reason)
        yield f"init_lora_weights = {as_json(init)}: {reason}"
    if taken and config.alora_invocation_tokens:
        # PEFT computes the tokens before the invocation with the changed base weights, too.
        yield (
            f"alora_invocation_tokens with init_lora_weights = {as_json(init)}: the start is taken "
            f"off the base weights for every token; save_pretrained with "
            f"path_initial_model_for_weight_conversion writes an adapter without it"
        )
    if config.bias != "none" and not own_modules:
        yield f"bias = {as_json(config.bias)}: it replaces biases of the base model"


def unknown_keys(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield each field, with its value, that is not empty and not known here."""
    known = {*PeftLoraConfig.model_fields, *_HARMLESS, *_REFUSED, *_REFUSED_IF_SET}
    for key, value in values.items():
        empty = value is None or value is False or value in ("", [], {})
        if key not in known and not empty:
            yield f"{key} = {as_json(value)}: not known here"


def _check_dora(values: Mapping[str, Any], config: PeftLoraConfig, path: Path) -> None:
    """Refuse the features that PEFT refuses beside DoRA: their result is not defined."""
    others = [key for key in _NOT_WITH_DORA if values.get(key) not in (None, False, [])]
    if str(config.init_lora_weights).lower() == "mica":
        others.append("init_lora_weights")
    if config.use_dora and others:
        given = [f"{key} = {as_json(values[key])}" for key in ("use_dora", *others)]
        what = f"PEFT does not combine DoRA with {others[0]}"
        raise InvalidInputError(problem(path, what, given, "use_dora without it"))


def _check_consistency(config: PeftLoraConfig, path: Path) -> None:
    if config.target_modules is None and not config.target_parameters:
        what = "target_modules is missing: PEFT would guess it from the architecture"
        missing, allowed = "target_modules = null", ALLOWED["target_modules"]
        raise InvalidInputError(problem(path, what, missing, allowed, "list the modules"))
    layers = config.layers_to_transform is not None
    if isinstance(config.target_modules, str) and (layers or config.layers_pattern is not None):
        what = "a regular expression as target_modules excludes a choice of layers"
        key = "layers_to_transform" if layers else "layers_pattern"
        given = [f"{name} = {as_json(getattr(config, name))}" for name in ("target_modules", key)]
        raise InvalidInputError(problem(path, what, given, f"one of them, {key} null"))
    if config.layers_pattern and not layers:
        given = [f"layers_pattern = {as_json(config.layers_pattern)}", "layers_to_transform = null"]
        what = "layers_pattern has no effect without layers_to_transform"
        raise InvalidInputError(problem(path, what, given, "both, or layers_pattern null"))
