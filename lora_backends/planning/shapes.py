"""What a model's configuration says about bytes: of its weights, of its cache, of an adapter."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
SCALE_BYTES = 4  # of a row of 8-bit values
TABLE_BYTES = 8  # a rank and a scaling, for each slot and module
CACHES = ("cache", "past_key_values", "cache_params")  # an output's names for it
_LENGTHS = (64, 128)  # tokens whose caches are compared


@dataclass(frozen=True)
class Layer:
    """Adapted modules that read the same input: one `run_linear`."""

    in_features: int
    output_slices: tuple[int, ...]
    count: int  # such layers in the model


class _Adapted(NamedTuple):
    """PEFT's matrices of one module."""

    lora_a: torch.Tensor  # [rank, in_features]; of E experts [E * rank, in_features]
    lora_b: torch.Tensor  # [out_features, rank]; of E experts [out_features, E * rank]
    is_stacked: bool  # a parameter of experts


@dataclass(frozen=True)
class ModelShapes:
    """A base model and the LoRA on it, in bytes."""

    origin: str
    base_bytes: int  # of the weights, shared ones once
    base_parameters: int
    cache_bytes_per_token: float | None  # None: the cache does not say
    adapter_bytes: int  # of one adapter's A and B at its rank, as the stacks store them
    slot_bytes: int  # of one slot of every stack, at max_rank
    file_bytes: int  # of one adapter's file, in the model's dtype
    layers: tuple[Layer, ...]
    rank: int
    max_rank: int
    dtype: str
    adapter_dtype: str
    notes: tuple[str, ...] = ()

    @property
    def modules(self) -> int:
        """Adapted modules."""
        return sum(layer.count * len(layer.output_slices) for layer in self.layers)


def read_shapes(
    config: Path,
    rank: int = 16,
    *,
    max_rank: int | None = None,
    target_modules: str | Sequence[str] = "all-linear",
    target_parameters: Sequence[str] = (),
    dtype: str = "bfloat16",
    adapter_dtype: str | None = None,
) -> ModelShapes:
    """Return the bytes of a Transformers model and of PEFT's LoRA on it.

    Transformers builds the model on the meta device, without memory; PEFT decides which modules an
    adapter touches, as `get_peft_model` does. A pass without values shows which modules share an
    input, and how its cache grows with the tokens.

    Args:
        config: a config.json, or the folder that has it.
        rank: of every adapter.
        max_rank: width of the stacks; None: `rank`.
        target_modules: as in PEFT's `LoraConfig`.
        target_parameters: likewise, for stacked experts.
        dtype: of the base model and the adapters' files.
        adapter_dtype: of the stacks; None: `dtype`.

    Raises:
        BackendUnavailableError: Transformers or PEFT is missing.
        InvalidInputError: no such file, no configuration, a rank or dtype that is none, or no
            module is adapted.
        UnsupportedInputError: no causal language model, or PEFT refuses the modules.
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
            f"rank {rank} and max_rank {max_rank} do not fit\n  allowed: 1 <= rank <= max_rank"
        )
    file = as_path(config, "--config-json")
    file = file / "config.json" if file.is_dir() else file
    base = _on_meta(file, getattr(torch, dtype))
    stored = {id(p): p for p in base.parameters()}.values()
    shared, cache, notes = _watch(base)
    adapted = _adapted(base, max_rank, target_modules, target_parameters)
    width = getattr(torch, adapter_dtype).itemsize
    pairs = [(module.lora_a, module.lora_b) for module in adapted.values()]
    if not pairs:
        raise InvalidInputError(
            f"no module of {file} is adapted\n  given: target_modules {target_modules}\n"
            f"  to do: name modules of the model, or all-linear"
        )
    values = sum(a.numel() + b.numel() for a, b in pairs)
    slot = width * values + TABLE_BYTES * len(adapted)
    if adapter_dtype in EIGHT_BIT:  # a scale for each row of A and B
        slot += SCALE_BYTES * sum(len(a) + b.numel() // max_rank for a, b in pairs)
    own = values * rank // max_rank  # every matrix has one axis of the rank
    scale_rows = sum(len(a) * rank // max_rank + b.numel() // max_rank for a, b in pairs)
    layers, left_out = _layers(adapted, shared)
    if getattr(base.config, "quantization_config", None) is not None:
        notes.append(f"quantization_config is not read: weights count as {dtype}")
    return ModelShapes(
        origin=str(file),
        base_bytes=sum(p.numel() * p.element_size() for p in stored),
        base_parameters=sum(p.numel() for p in stored),
        cache_bytes_per_token=cache,
        adapter_bytes=width * own + (SCALE_BYTES * scale_rows if adapter_dtype in EIGHT_BIT else 0),
        slot_bytes=slot,
        file_bytes=getattr(torch, dtype).itemsize * own,
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
            "plan builds the model of a configuration with Transformers\n"
            "  to do: pip install 'lora-backends[bench]'"
        ) from error
    try:
        found = json.loads(read_text(file))
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{file} is not valid JSON: {error}") from error
    kind = found.get("model_type") if isinstance(found, dict) else None
    if not isinstance(kind, str):
        raise InvalidInputError(f"{file} is no configuration of a model\n  given: no model_type")
    try:
        # Read from the file alone: plan runs no code that a model brings.
        configuration = transformers.AutoConfig.for_model(**found)
        with torch.device("meta"):
            base = transformers.AutoModelForCausalLM.from_config(
                configuration, dtype=dtype, trust_remote_code=False
            )
    except Exception as error:  # of the model's own code, whatever it is
        raise UnsupportedInputError(
            f"Transformers makes no causal language model of {file}\n"
            f"  given: model_type {kind!r}\n  reason: {type(error).__name__}: {error}"
        ) from error
    return base.eval()


def _watch(base: Any) -> tuple[dict[str, int], float | None, list[str]]:
    """Return modules that share an input by a number, the cache's bytes per token, and notes."""
    inputs: dict[str, torch.Tensor] = {}  # kept, so that no two have one address

    def note(path: str) -> Callable[[Any, Any], None]:
        def hook(_: Any, given: Any) -> None:  # what it returns would replace the input
            if given:
                inputs.setdefault(path, given[0])

        return hook

    hooks = [
        module.register_forward_pre_hook(note(path))
        for path, module in base.named_modules()
        if path
    ]
    caches = []
    try:
        with torch.no_grad(), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for tokens in _LENGTHS:
                output = base(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=True)
                named = (getattr(output, name, None) for name in CACHES)
                held = next((cache for cache in named if cache is not None), ())
                parts = {id(t): t for t in _tensors(held, set())}.values()
                caches.append(sum(t.numel() * t.element_size() for t in parts))
    except Exception as error:  # of the model's own code, whatever it is
        note_ = f"a pass without values fails ({type(error).__name__}), so the cache is unknown"
        return {}, None, [note_]
    finally:
        for hook in hooks:
            hook.remove()
    numbers: dict[int, int] = {}
    shared = {path: numbers.setdefault(id(x), len(numbers)) for path, x in inputs.items()}
    grown = (caches[1] - caches[0]) / (_LENGTHS[1] - _LENGTHS[0])
    if grown <= 0:
        return shared, None, ["the cache does not grow with the tokens, so its size is unknown"]
    notes = []
    if getattr(base.config.get_text_config(), "sliding_window", None):
        notes.append("layers with a sliding window keep fewer tokens than is counted here")
    return shared, grown, notes


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors of a cache, whatever its class."""
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
    """Return what PEFT adapts, by the module's path."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise BackendUnavailableError(
            "plan asks PEFT which modules an adapter touches\n"
            "  to do: pip install 'lora-backends[bench]'"
        ) from error
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
            # On the meta device, too: an adapter of a large mixture takes gigabytes.
            model = get_peft_model(base, config, low_cpu_mem_usage=True)
    except Exception as error:  # PEFT has no class of its own
        raise UnsupportedInputError(
            f"PEFT makes no adapter\n  given: target_modules {modules}, target_parameters "
            f"{list(target_parameters)}\n  reason: {type(error).__name__}: {error}"
        ) from error
    found = {}
    for path, module in model.base_model.model.named_modules():
        for names in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
            held: list[Any] = [getattr(module, name, None) for name in names]
            if held[0] is not None and "default" in held[0]:
                made = [getattr(each["default"], "weight", each["default"]) for each in held]
                found[path] = _Adapted(made[0], made[1], hasattr(module, "parameter_name"))
    return found


def _check_names(option: str, names: Sequence[str], paths: Mapping[str, object]) -> None:
    """Refuse names that end no path: PEFT adapts the others without a word."""
    for name in names:
        if not any(path == name or path.endswith(f".{name}") for path in paths):
            last = {path.rpartition(".")[2] for path in paths}
            raise InvalidInputError(
                f"{option} has {name!r}, which the model has not{did_you_mean(name, last)}"
            )


def _layers(
    adapted: dict[str, _Adapted], shared: dict[str, int]
) -> tuple[tuple[Layer, ...], list[str]]:
    """Return the layers of one call each, and notes on modules that are not timed."""
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
    notes = [f"{stacked} parameters of experts count in bytes, not in time"] if stacked else []
    layers = tuple(Layer(width, slices, count) for (width, slices), count in counts.items())
    return layers, notes
