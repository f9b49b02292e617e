"""`adapter_config.json`: which modules have LoRA, with which rank and scaling.

Everything that `base(x) + scaling * (B A x + b)` cannot reproduce exactly is refused by its name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lora_backends.errors import InvalidInputError, UnsupportedInputError

CONFIG_FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"
T = TypeVar("T")
Rank = Annotated[int, Field(gt=0, lt=2**31)]
Alpha = Annotated[float, Field(gt=-3e38, lt=3e38)]  # within float32


class PeftLoraConfig(BaseModel):
    """The fields of `adapter_config.json` that decide what the adapter computes."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    peft_type: str
    r: Rank = 8
    lora_alpha: Alpha = 8
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Alpha] | None = None
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    init_lora_weights: bool | str = True
    ensure_weight_tying: bool = False
    task_type: str | None = None


_ALLOWED = {
    "peft_type": '"LORA"',
    "r": "an integer above 0",
    "lora_alpha": "a finite number",
    "rank_pattern": "an object of names or regular expressions to integers above 0, or null",
    "alpha_pattern": "an object of names or regular expressions to finite numbers, or null",
    "target_modules": f'a list of module names, a regular expression or "{ALL_LINEAR}"',
    "exclude_modules": "a list of module names, a regular expression or null",
    "layers_to_transform": "an integer, a list of integers or null",
    "layers_pattern": "a regular expression, a list of them or null",
    "bias": '"none"',
    "init_lora_weights": "true, false or a name",
    "task_type": "a string or null",
}
_ALLOWED_ELSE = "true or false"

# Fields that change training, saving or memory only. VeLoRA and MonteCLoRA alter the forward pass
# of training alone; the configurations of initialisations act only through init_lora_weights.
_HARMLESS = frozenset(
    """auto_mapping base_model_name_or_path corda_config eva_config inference_mode loftq_config
    lora_dropout lora_ga_config megatron_core monteclora_config peft_version qalora_group_size
    revision runtime_config velora_config""".split()
)

# Refused where the value is not empty.
_REFUSED = {
    "alora_invocation_tokens": "the update starts at a marker inside the prompt",
    "layer_replication": "it repeats layers of the base model",
    "megatron_config": "its layers are split over Megatron's ranks",
    "modules_to_save": "it replaces whole modules of the base model",
    "target_parameters": "it adapts parameters of experts, not modules",
    "trainable_token_indices": "it replaces rows of the embedding",
    "use_dora": "the update is rescaled by norms of the base weight",
    "use_qalora": "the input is pooled into groups",
}

# Refused where the value is an object, an empty one too: its defaults already switch them on.
_REFUSED_IF_SET = {
    "arrow_config": "a router mixes several adapters",
    "kasa_config": "it truncates the base weight and puts a diagonal between B and A",
    "use_bdlora": "its matrices are block-diagonal and stored packed",
}

# LoRA-GA changes the base weight while it trains, not when it is loaded.
_PLAIN_INITS = frozenset({"eva", "gaussian", "lora_ga", "mica", "orthogonal"})
_TIED_NAMES = ("embed_tokens", "lm_head")
_HEAD_NAMES = ("lm_head", "embed_out")
_CLASSIFIER_NAMES = ("score", "classifier")


def problem(
    path: Path, what: str, given: str | list[str], allowed: str, to_do: str | None = None
) -> str:
    """Return the message of an error about one file: one fact per line."""
    lines = [f"cannot read the PEFT checkpoint: {what}", f"  file: {path}"]
    lines += [f"  given: {fact}" for fact in ([given] if isinstance(given, str) else given)]
    lines += [f"  allowed: {allowed}"] + ([f"  to do: {to_do}"] if to_do else [])
    return "\n".join(lines)


def read_config(path: Path) -> PeftLoraConfig:
    """Read `adapter_config.json`, or say why its adapter cannot be reproduced exactly.

    Args:
        path: the file.

    Returns:
        The fields that decide what the adapter computes.

    Raises:
        InvalidInputError: no file, no JSON object, a wrong type or fields that contradict.
        UnsupportedInputError: features beyond plain LoRA; the message names every one.
    """
    values = _read_json_object(path)
    if values.get("peft_type", "LORA") != "LORA":
        raise UnsupportedInputError(
            problem(
                path,
                f"peft_type {_show(values['peft_type'])} is another method than LoRA",
                f"peft_type = {_show(values['peft_type'])}",
                _ALLOWED["peft_type"],
                "merge the adapter into its base model",
            )
        )
    config = _validated(values, path)
    _check_expressions(config, path)
    refused = [*_refused_keys(values), *_refused_values(config), *_unknown_keys(values)]
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


def module_rank(config: PeftLoraConfig, module: str) -> int:
    """Return the rank of a module: the first pattern that matches its path, else `r`."""
    return _first_match(config.rank_pattern or {}, module, config.r)


def module_scaling(config: PeftLoraConfig, module: str) -> float:
    """Return `alpha / r`, or `alpha / sqrt(r)` for rsLoRA, with the module's own alpha and r."""
    rank = module_rank(config, module)
    alpha = _first_match(config.alpha_pattern or {}, module, config.lora_alpha)
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)


def targets_module(config: PeftLoraConfig, module: str) -> bool:
    """Return whether PEFT puts LoRA on the module with this path.

    A list matches whole trailing components; `layers_to_transform` narrows such matches, but not
    an entry that is the full path. A string is a regular expression for the full path.
    "all-linear" leaves out the head, which is recognised by its name here.
    """
    if config.exclude_modules and _names(config.exclude_modules, module):
        return False
    targets = config.target_modules
    if targets is None:
        return False
    if isinstance(targets, str):
        if targets.lower() == ALL_LINEAR:
            return not _is_head(config, module)
        return _names(targets, module)
    return module in targets or (_names(targets, module) and _in_chosen_layer(config, module))


def _read_json_object(path: Path) -> dict[str, Any]:
    to_do = "pass the folder that PEFT's save_pretrained wrote"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        what = f"there is no {CONFIG_FILE}"
        message = problem(
            path.parent, what, "a folder without it", f"one with {CONFIG_FILE}", to_do
        )
        raise InvalidInputError(message) from error
    except (OSError, ValueError, RecursionError) as error:
        what = f"{CONFIG_FILE} is not readable JSON"
        raise InvalidInputError(
            problem(path, what, f"{type(error).__name__}: {error}", "a JSON object", to_do)
        ) from error
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
    given = [f"{key} = {_show(values[key])}" if key in values else f"no {key}" for key in keys]
    allowed = "; ".join(f"{key} is {_ALLOWED.get(key, _ALLOWED_ELSE)}" for key in keys)
    raise InvalidInputError(
        problem(path, f"wrong value of {', '.join(keys)}", given, allowed, "correct the file")
    )


def _refused_keys(values: Mapping[str, Any]) -> Iterator[str]:
    for key, reason in _REFUSED.items():
        if values.get(key):
            yield f"{key} = {_show(values[key])}: {reason}"
    for key, reason in _REFUSED_IF_SET.items():
        if values.get(key) not in (None, False):
            yield f"{key} = {_show(values[key])}: {reason}"


def _refused_values(config: PeftLoraConfig) -> Iterator[str]:
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        reason = "loading it changes the base weights, or it is not known"
        yield f"init_lora_weights = {_show(init)}: {reason}"
    if config.bias != "none":
        yield f"bias = {_show(config.bias)}: it replaces biases of the base model"
    if config.ensure_weight_tying and _targets_tied_names(config):
        reason = "whether the head is adapted depends on the base model's tied weights"
        yield f"ensure_weight_tying = true: {reason}"


def _unknown_keys(values: Mapping[str, Any]) -> Iterator[str]:
    known = {*PeftLoraConfig.model_fields, *_HARMLESS, *_REFUSED, *_REFUSED_IF_SET}
    for key, value in values.items():
        empty = value is None or value is False or value in ("", [], {})
        if key not in known and not empty:
            yield f"{key} = {_show(value)}: not known here"


def _targets_tied_names(config: PeftLoraConfig) -> bool:
    targets = config.target_modules or []
    if isinstance(targets, str):
        return any(_fits(targets, name) for name in _TIED_NAMES)
    return any(target.split(".")[-1] in _TIED_NAMES for target in targets)


def _check_consistency(config: PeftLoraConfig, path: Path) -> None:
    if config.target_modules is None:
        what = "target_modules is missing: PEFT would guess it from the architecture"
        missing, allowed = "target_modules = null", _ALLOWED["target_modules"]
        raise InvalidInputError(problem(path, what, missing, allowed, "list the modules"))
    layers = config.layers_to_transform is not None
    if isinstance(config.target_modules, str) and (layers or config.layers_pattern is not None):
        what = "a regular expression as target_modules excludes a choice of layers"
        key = "layers_to_transform" if layers else "layers_pattern"
        given = [f"{name} = {_show(getattr(config, name))}" for name in ("target_modules", key)]
        raise InvalidInputError(problem(path, what, given, f"one of them, {key} null"))
    if config.layers_pattern and not layers:
        given = [f"layers_pattern = {_show(config.layers_pattern)}", "layers_to_transform = null"]
        what = "layers_pattern has no effect without layers_to_transform"
        raise InvalidInputError(problem(path, what, given, "both, or layers_pattern null"))


def _check_expressions(config: PeftLoraConfig, path: Path) -> None:
    for key, pattern, expression in _expressions(config):
        try:
            re.compile(expression)
        except re.error as error:
            what = f"{key} holds a broken regular expression"
            given = [f"{_show(pattern)}", f"{error}"]
            raise InvalidInputError(problem(path, what, given, _ALLOWED[key])) from error


def _expressions(config: PeftLoraConfig) -> Iterator[tuple[str, str, str]]:
    for key in ("target_modules", "exclude_modules"):
        value = getattr(config, key)
        if isinstance(value, str):
            yield key, value, value
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, key) or ():
            yield key, pattern, _suffix_expression(pattern)
    for pattern in _layer_patterns(config):
        yield "layers_pattern", pattern, _layer_expression(pattern)


def _suffix_expression(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _layer_expression(pattern: str) -> str:
    return rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\."


def _layer_patterns(config: PeftLoraConfig) -> list[str]:
    patterns = config.layers_pattern or []
    return [patterns] if isinstance(patterns, str) else patterns


def _first_match(patterns: Mapping[str, T], module: str, default: T) -> T:
    for pattern, value in patterns.items():
        if re.match(_suffix_expression(pattern), module):
            return value
    # A path that is a key, but does not match itself as an expression, counts as well.
    return patterns.get(module, default)


def _names(names: list[str] | str, module: str) -> bool:
    if isinstance(names, str):
        return _fits(names, module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _fits(expression: str, module: str) -> bool:
    return re.fullmatch(expression, module) is not None


def _in_chosen_layer(config: PeftLoraConfig, module: str) -> bool:
    chosen = config.layers_to_transform
    if chosen is None or chosen == []:
        return True
    # The first numbered component counts: later ones number experts.
    expressions = [_layer_expression(p) for p in _layer_patterns(config)]
    for expression in expressions or [r".*?\.[^.]*\.(?P<layer>\d+)\."]:
        match = re.match(expression, module)
        if match:
            return int(match["layer"]) in ([chosen] if isinstance(chosen, int) else chosen)
    return False


def _is_head(config: PeftLoraConfig, module: str) -> bool:
    classifier = config.task_type == "SEQ_CLS" and module in _CLASSIFIER_NAMES
    return classifier or module.split(".")[-1] in _HEAD_NAMES


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
