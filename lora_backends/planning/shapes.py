"""Bytes of a model's weights, cache and adapters, derived from its configuration."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lora_backends.common.files import as_path, read_text
from lora_backends.errors import (
    BackendUnavailableError,
    InvalidInputError,
    UnsupportedInputError,
    did_you_mean,
    shown,
)
from lora_backends.planning.checks import check_whole

DTYPES = ("float16", "bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
EIGHT_BIT = DTYPES[3:]
SCALE_BYTES = 4  # one float32 scale per row of an 8-bit matrix
TABLE_BYTES = 8  # the rank and the scaling of one slot at one module
CACHES = ("cache", "past_key_values", "cache_params")  # names of the cache in a model's output
_LENGTHS = (64, 128)  # tokens of the two passes whose caches are compared; a short window cuts both


@dataclass(frozen=True)
class LayerGroup:
    """Adapted modules that read the same input: one `run_linear`."""

    in_features: int
    output_slices: tuple[int, ...]
    count: int  # number of such layers in the model


class _Adapted(NamedTuple):
    """PEFT's matrices of one module."""

    lora_a: torch.Tensor  # [rank, in_features]; for E experts [E * rank, in_features]
    lora_b: torch.Tensor  # [out_features, rank]; for E experts [out_features, E * rank]
    is_stacked: bool  # whether the module is a parameter of stacked experts
    rank: int  # PEFT may give gate and up of experts, which are one matrix, twice the rank


@dataclass(frozen=True)
class ModelShapes:
    """Sizes of a base model and of its LoRA."""

    origin: str  # path of the configuration
    base_bytes: int  # weights; shared ones count once
    base_parameters: int
    cache_bytes_per_token: float | None  # None: unknown
    adapter_bytes: int  # A and B of one adapter, `rank` wide, in adapter_dtype
    slot_bytes: int  # one slot of all stacks, `max_rank` wide, in adapter_dtype
    file_bytes: int  # A and B of one adapter, `rank` wide, in dtype
    layers: tuple[LayerGroup, ...]
    rank: int
    max_rank: int
    dtype: str
    adapter_dtype: str
    notes: tuple[str, ...] = ()

    @property
    def modules(self) -> int:
        """Number of adapted modules, parameters of experts not included."""
        return sum(layer.count * len(layer.output_slices) for layer in self.layers)


def read_shapes(
    config: Path,  # a config.json, or its folder
    rank: int = 16,  # of every adapter
    *,
    max_rank: int | None = None,  # that the stacks have room for; None: `rank`
    target_modules: str | Sequence[str] = "all-linear",  # as in PEFT's `LoraConfig`
    target_parameters: Sequence[str] = (),  # the same, for stacked experts
    dtype: str = "bfloat16",  # or float16, float32: of the base model and of files
    adapter_dtype: str | None = None,  # of the stacks, or one of 8 bits; None: `dtype`
) -> ModelShapes:
    """Return the sizes of a Transformers model and of PEFT's LoRA on it.

    Raises:
        BackendUnavailableError: Transformers or PEFT is not installed.
        InvalidInputError: the file is missing or no model configuration, a rank or dtype is not
            allowed, a name of a module or parameter is not in the model, or no module is adapted.
        UnsupportedInputError: Transformers has no causal language model of this type, or PEFT
            cannot adapt these modules.
    """
    adapter_dtype = adapter_dtype or dtype
    for option, value, allowed in (
        ("dtype", dtype, DTYPES[:3]),
        ("adapter_dtype", adapter_dtype, (dtype, *EIGHT_BIT)),
    ):
        if not isinstance(value, str) or value not in allowed:
            raise InvalidInputError(
                f"{option} is {shown(value)}{did_you_mean(str(value), allowed)}\n"
                f"  allowed: {', '.join(allowed)}"
            )
    max_rank = rank if max_rank is None else max_rank
    check_whole("rank", rank)
    check_whole("max_rank", max_rank)
    if rank > max_rank:
        raise InvalidInputError(
            f"rank {rank} is larger than max_rank {max_rank}\n  allowed: 1 <= rank <= max_rank"
        )
    file = as_path(config, "--config-json")
    file = file / "config.json" if file.is_dir() else file
    # on the meta device, as PEFT's adapter below, so neither takes memory
    base = _on_meta(file, getattr(torch, dtype))
    weights = {id(p): p for p in base.parameters()}.values()
    # two forward passes show which modules share an input, and by how much the cache grows per
    # token
    shared, cache, notes = _watch(base)
    adapted = _adapted(base, max_rank, target_modules, target_parameters)
    if not adapted:
        raise InvalidInputError(
            f"no module of {file} is adapted\n  given: target_modules {target_modules}\n"
            f"  to do: name modules of the model, or use all-linear"
        )
    stored = partial(_stored_bytes, list(adapted.values()), max_rank)
    layers, left_out = _layers(adapted, shared)
    widest = max((module.rank for module in adapted.values() if module.is_stacked), default=0)
    if widest > max_rank:
        notes.append(f"PEFT gives gate and up of experts rank {widest}: set max_expert_rank to it")
    if getattr(base.config, "quantization_config", None) is not None:
        notes.append(f"quantization_config is ignored: weights count as {dtype}")
    return ModelShapes(
        origin=str(file),
        base_bytes=sum(p.nbytes for p in weights),
        base_parameters=sum(p.numel() for p in weights),
        cache_bytes_per_token=cache,
        adapter_bytes=stored(rank, adapter_dtype),
        slot_bytes=stored(max_rank, adapter_dtype, in_slot=True) + TABLE_BYTES * len(adapted),
        file_bytes=stored(rank, dtype),
        layers=layers,
        rank=rank,
        max_rank=max_rank,
        dtype=dtype,
        adapter_dtype=adapter_dtype,
        notes=(*notes, *left_out),
    )


def _on_meta(file: Path, dtype: torch.dtype) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise BackendUnavailableError(
            "a plan needs Transformers, which builds the model of a configuration\n"
            "  to do: pip install 'lora-backends[bench]'"
        ) from error
    try:
        settings = json.loads(read_text(file))
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{file} is not valid JSON: {error}") from error
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if not isinstance(kind, str):
        raise InvalidInputError(f"{file} is no model configuration\n  given: no model_type")
    try:
        # From the file's keys alone, so that no code of the model's repository runs.
        configuration = transformers.AutoConfig.for_model(**settings)
        with torch.device("meta"):
            base = transformers.AutoModelForCausalLM.from_config(
                configuration, dtype=dtype, trust_remote_code=False
            )
    except Exception as error:  # a model's own code may raise anything
        raise UnsupportedInputError(
            f"Transformers makes no causal language model of {file}\n"
            f"  given: model_type {kind!r}\n  reason: {type(error).__name__}: {error}"
        ) from error
    return base.eval()


def _watch(base: Any) -> tuple[dict[str, int], float | None, list[str]]:
    """Run two forward passes on the meta device.

    Returns:
        A number per module path, equal for modules that read the same input; the bytes that the
        cache grows by per token, or None where they are unknown; and notes.
    """
    inputs: dict[str, torch.Tensor] = {}  # kept alive, so that no id is used twice

    def note(path: str) -> Callable[[Any, Any], None]:
        def hook(_: Any, given: Any) -> None:  # a value returned here would replace the input
            if given:
                inputs.setdefault(path, given[0])

        return hook

    hooks = [
        module.register_forward_pre_hook(note(path))
        for path, module in base.named_modules()
        if path
    ]
    caches = []
    window = getattr(base.config.get_text_config(), "sliding_window", None)
    # Beyond its window a layer's cache does not grow.
    last = max(2, min(_LENGTHS[1], (window or _LENGTHS[1] + 1) - 1))
    lengths = (last // 2, last) if last < _LENGTHS[1] else _LENGTHS
    try:
        if hasattr(base, "set_experts_implementation"):
            # the default one looks for experts without tokens, but meta tensors hold no values
            base.set_experts_implementation("batched_mm")
        with torch.no_grad(), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for tokens in lengths:
                output = base(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=True)
                named = (getattr(output, name, None) for name in CACHES)
                held = next((cache for cache in named if cache is not None), ())
                parts = {id(t): t for t in _tensors(held, set())}.values()
                caches.append(sum(t.nbytes for t in parts))
    except Exception as error:  # a model's own code may raise anything
        failed = f"a forward pass on the meta device fails ({type(error).__name__})"
        return {}, None, [f"{failed}: the size of the cache is unknown"]
    finally:
        for hook in hooks:
            hook.remove()
    numbers: dict[int, int] = {}
    shared = {path: numbers.setdefault(id(x), len(numbers)) for path, x in inputs.items()}
    grown = (caches[1] - caches[0]) / (lengths[1] - lengths[0])
    if grown <= 0:
        return shared, None, ["the cache does not grow with the tokens: its size is unknown"]
    notes = []
    if window:
        notes.append("layers with a sliding window count as layers with full attention")
    return shared, grown, notes


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in a cache of any class."""
    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, dict):
            parts: Any = value.values()
        elif isinstance(value, (list, tuple)):
            parts = value
        else:
            parts = vars(value).values() if hasattr(value, "__dict__") else ()
        for part in parts:
            yield from _tensors(part, seen)


def _adapted(
    base: Any, rank: int, target_modules: str | Sequence[str], target_parameters: Sequence[str]
) -> dict[str, _Adapted]:
    """Return the modules that PEFT adapts, by path."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise BackendUnavailableError(
            "a plan needs PEFT, which chooses the modules that an adapter touches\n"
            "  to do: pip install 'lora-backends[bench]'"
        ) from error
    for option, names in (
        ("target_modules", [target_modules] if isinstance(target_modules, str) else target_modules),
        ("target_parameters", target_parameters),
    ):
        if isinstance(names, str) or not (
            isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
        ):
            raise InvalidInputError(f"{option} is {shown(names)}\n  allowed: a list of names")
    modules = target_modules if isinstance(target_modules, str) else list(target_modules)
    if not isinstance(modules, str):
        _check_names("target_modules", modules, dict(base.named_modules()))
    _check_names("target_parameters", target_parameters, dict(base.named_parameters()))
    config = LoraConfig(
        r=rank, target_modules=modules, target_parameters=list(target_parameters) or None
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # PEFT too keeps to the meta device: an adapter of many experts takes gigabytes.
            model = get_peft_model(base, config, low_cpu_mem_usage=True)
    except Exception as error:  # PEFT has no error class of its own
        raise UnsupportedInputError(
            f"PEFT cannot adapt the model\n  given: target_modules {modules}, target_parameters "
            f"{list(target_parameters)}\n  reason: {type(error).__name__}: {error}"
        ) from error
    adapted = {}
    for path, module in model.base_model.model.named_modules():
        for names in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
            held: list[Any] = [getattr(module, name, None) for name in names]
            if held[0] is not None and "default" in held[0]:
                made = [getattr(each["default"], "weight", each["default"]) for each in held]
                own: Any = module.r
                # a router's parameter is one matrix, like a linear layer's weight
                stacked = hasattr(module, "parameter_name") and module.get_param().ndim == 3
                adapted[path] = _Adapted(made[0], made[1], stacked, own["default"])
    return adapted


def _stored_bytes(
    modules: Sequence[_Adapted], made_rank: int, rank: int, dtype: str, in_slot: bool = False
) -> int:
    """Return the bytes, scales included, of A and B at `rank`; they were made with `made_rank`.

    In a slot, all stacks of experts have room for the largest rank among them.
    """
    widest = max((module.rank for module in modules if module.is_stacked), default=0)
    values = scales = 0
    for a, b, is_stacked, own in modules:
        # One axis of both matrices is proportional to the rank.
        wide = widest if in_slot and is_stacked else own
        values += (a.numel() + b.numel()) * wide * rank // (own * made_rank)
        scales += len(a) * wide * rank // (own * made_rank) + b.numel() // own
    scale_bytes = SCALE_BYTES * scales if dtype in EIGHT_BIT else 0
    return int(getattr(torch, dtype).itemsize) * values + scale_bytes


def _check_names(option: str, names: Sequence[str], paths: Mapping[str, object]) -> None:
    """Refuse a name that ends no path; PEFT would ignore it without a warning."""
    for name in names:
        if not any(path == name or path.endswith(f".{name}") for path in paths):
            last = {path.rpartition(".")[2] for path in paths}
            raise InvalidInputError(
                f"{option} names {name!r}, which the model lacks{did_you_mean(name, last)}"
            )


def _layers(
    adapted: dict[str, _Adapted], shared: dict[str, int]
) -> tuple[tuple[LayerGroup, ...], list[str]]:
    """Return the layers, one `run_linear` each, and notes on modules that are not timed."""
    groups: dict[Any, list[tuple[int, int]]] = {}
    for path, module in adapted.items():
        if not module.is_stacked:
            widths = module.lora_a.shape[1], module.lora_b.shape[0]
            groups.setdefault(shared.get(path, path), []).append(widths)
    counts: dict[tuple[int, tuple[int, ...]], int] = {}
    for members in groups.values():
        key = (members[0][0], tuple(out for _, out in members))
        counts[key] = counts.get(key, 0) + 1
    stacked = sum(module.is_stacked for module in adapted.values())
    notes = [f"{stacked} parameters of experts count in bytes, but not in time"] if stacked else []
    layers = tuple(LayerGroup(width, slices, count) for (width, slices), count in counts.items())
    return layers, notes
