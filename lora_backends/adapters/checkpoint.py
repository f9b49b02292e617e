"""Reading a folder that PEFT's `save_pretrained` wrote, without trusting anything in it."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lora_backends.adapters.peft_config import (
    CONFIG_FILE,
    PeftLoraConfig,
    module_rank,
    module_scaling,
    problem,
    read_config,
    targets_module,
)
from lora_backends.adapters.specs import Checkpoint, Kind, ModuleDelta, ModuleSpec
from lora_backends.errors import InvalidInputError, UnsupportedInputError, did_you_mean

SAFETENSORS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_BASE_WEIGHT = "base_layer.weight"
_BIAS = "lora_B.bias"
_MATRICES: dict[Kind, tuple[str, str]] = {
    "linear": ("lora_A.weight", "lora_B.weight"),
    "embedding": ("lora_embedding_A", "lora_embedding_B"),
}
_PARTS = (*_MATRICES["linear"], _BIAS, *_MATRICES["embedding"], _BASE_WEIGHT)

# What only training reads: VeLoRA's projection, MonteCLoRA's sampler.
_TRAINING_ONLY = re.compile(r"\.(lora_velora_embed|lora_monteclora_sampler\.\w+)$")

# Tensors of features that change the result in other ways than a low-rank update; first hit wins.
_REFUSED = (
    (r"\.lora_magnitude_vector\b", "use_dora (DoRA)"),
    (r"\.lora_diag\b", "kasa_config (KaSA)"),
    (r"\.lora_arrow\b", "arrow_config (Arrow)"),
    (r"\.(token_adapter\.|trainable_tokens_)", "trainable_token_indices"),
    (r"(^|\.)experts\.lora_|\.base_layer\.lora_", "target_parameters (stacked experts)"),
    (r"\.base_layer\.bias$", 'bias = "all" or "lora_only" (biases of the base model)'),
    (r"\.lora_E$|\.ranknum$", 'peft_type = "ADALORA"'),
    (
        r"\.(modules_to_save|original_module)\.|^(?!.*lora_).*(?<!base_layer)\.(weight|bias)$",
        "modules_to_save, or an embedding that was resized (whole base modules)",
    ),
)


@dataclass(frozen=True)
class _Source:
    """Where tensors come from and what they are checked against."""

    path: Path
    config: PeftLoraConfig
    specs: Mapping[str, ModuleSpec] | None
    max_rank: int | None

    def error(
        self, what: str, given: str | list[str], allowed: str, to_do: str | None = None
    ) -> InvalidInputError:
        return InvalidInputError(problem(self.path, what, given, allowed, to_do))


def read_checkpoint(
    folder: str | Path,
    modules: Mapping[str, ModuleSpec] | None = None,
    max_rank: int | None = None,
) -> Checkpoint:
    """Read a PEFT LoRA checkpoint: `delta(x) = scaling * B (A x) + bias` for each module in it.

    Nothing is reproduced approximately, and no code in the folder is run. The tensors in the file
    decide which modules have LoRA: it may hold fewer than `target_modules` names.

    Args:
        folder: holds `adapter_config.json` and `adapter_model.safetensors`, else
            `adapter_model.bin`; "~" is expanded.
        modules: what the base model has at each path; None skips the comparison with it.
        max_rank: the largest rank that the caller has room for; None sets no limit.

    Returns:
        One `ModuleDelta` for each module with LoRA, and the copies of base weights in the file.

    Raises:
        InvalidInputError: a file is missing or damaged, or contradicts itself or the base model.
        UnsupportedInputError: the adapter uses a feature that is not reproduced exactly.
    """
    path = Path(folder).expanduser()
    _check_is_folder(path)
    config = read_config(path / CONFIG_FILE)
    weights, read = _find_weights(path)
    source = _Source(weights, config, modules, max_rank)
    tensors = read(weights)
    _refuse_features(source, tensors)
    parts_of = _group(source, tensors)
    deltas = {module: _read_delta(source, module, parts_of[module]) for module in sorted(parts_of)}
    copies = {
        name: parts[_BASE_WEIGHT] for name, parts in parts_of.items() if _BASE_WEIGHT in parts
    }
    return Checkpoint(path, MappingProxyType(deltas), MappingProxyType(copies))


def _check_is_folder(path: Path) -> None:
    if path.is_dir():
        return
    given = "a file" if path.exists() else "no such folder"
    to_do = "pass the folder that PEFT's save_pretrained wrote"
    raise InvalidInputError(problem(path, "it is not a folder", given, "a folder", to_do))


def _find_weights(folder: Path) -> tuple[Path, Callable[[Path], dict[str, Tensor]]]:
    for name, read in ((SAFETENSORS_FILE, _read_safetensors), (PICKLE_FILE, _read_pickle)):
        if (folder / name).exists():
            return folder / name, read
    given = f"{CONFIG_FILE} alone"
    allowed = f"{SAFETENSORS_FILE} or {PICKLE_FILE} beside it"
    to_do = "copy the weights into the folder"
    raise InvalidInputError(problem(folder, "there are no weights", given, allowed, to_do))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(str(path), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        given = f"{type(error).__name__}: {error}"
        to_do = "copy or download the file again: it may be cut off"
        message = problem(path, "the file is damaged", given, "a safetensors file", to_do)
        raise InvalidInputError(message) from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError as error:
        what = "the file is damaged, or needs code to be unpickled, which is never run"
        raise InvalidInputError(_pickle_problem(path, what, error)) from error
    except Exception as error:  # a damaged pickle makes the unpickler fail in any way
        raise InvalidInputError(_pickle_problem(path, "the file is damaged", error)) from error
    if not isinstance(content, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
    ):
        given, allowed = f"a {type(content).__name__}", "a dict of names to tensors, nothing else"
        message = problem(path, "the file holds no state dict", given, allowed, _CONVERT)
        raise InvalidInputError(message)
    return {key: value.detach() for key, value in content.items()}


_CONVERT = f"save the adapter again as {SAFETENSORS_FILE}"


def _pickle_problem(path: Path, what: str, error: Exception) -> str:
    given = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}"
    return problem(path, what, given, "a file of tensors from torch.save", _CONVERT)


def _refuse_features(source: _Source, tensors: Mapping[str, Tensor]) -> None:
    found: dict[str, str] = {}
    for key, tensor in tensors.items():
        feature = _feature_of(key, tensor)
        if feature:
            found.setdefault(feature, f"{feature}, by tensor {key!r} {list(tensor.shape)}")
    if found:
        what = "the weights belong to features that this library cannot reproduce exactly"
        allowed = "LoRA that computes base(x) + scaling * (B A x + b)"
        to_do = "merge the adapter into its base model, or train it without these features"
        message = problem(source.path, what, list(found.values()), allowed, to_do)
        raise UnsupportedInputError(message)


def _feature_of(key: str, tensor: Tensor) -> str | None:
    if not key.startswith(_PREFIX):
        return None
    name = key.removeprefix(_PREFIX)
    for pattern, feature in _REFUSED:
        if re.search(pattern, name):
            return feature
    if tensor.ndim > 2 and ".lora_" in name and not _TRAINING_ONLY.search(name):
        experts = "experts" in name.split(".")
        return "target_parameters (stacked experts)" if experts else "LoRA of a convolution"
    return None


def _group(source: _Source, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts_of: dict[str, dict[str, Tensor]] = {}
    strange = []
    for key, tensor in tensors.items():
        module, part = _split(key)
        if part:
            parts_of.setdefault(module, {})[part] = tensor
        elif not _TRAINING_ONLY.search(key):
            strange.append(key)
    if strange:
        raise source.error(
            "some tensors are not understood",
            [f"tensor {key!r}" for key in strange[:5]] + ["..."] * (len(strange) > 5),
            f"{_PREFIX}<module path>.<one of {', '.join(_PARTS)}>",
            "save the adapter again with PEFT's save_pretrained",
        )
    if not parts_of:
        given = f"{len(tensors)} tensors"
        raise source.error("there are no LoRA tensors", given, "at least one module with LoRA")
    return parts_of


def _split(key: str) -> tuple[str, str | None]:
    name = key.removeprefix(_PREFIX)
    if name != key:
        for part in _PARTS:
            if name.endswith(f".{part}"):
                return name.removesuffix(f".{part}"), part
    return key, None


def _read_delta(source: _Source, module: str, parts: Mapping[str, Tensor]) -> ModuleDelta:
    kind = _kind_of(source, module, parts)
    _check_targeted(source, module)
    _check_lora_bias(source, module, kind, parts)
    spec = _spec_of(source, module, kind)
    rank = module_rank(source.config, module)
    _check_room(source, module, rank)
    name_a, name_b = _MATRICES[kind]
    lora_a, lora_b = parts[name_a], parts[name_b]
    wide = _width(lora_a, 1) if spec is None else spec.in_features
    high = _width(lora_b, 0) if spec is None else spec.out_features
    shapes: dict[str, tuple[int, ...]] = {name_a: (rank, wide), name_b: (high, rank)}
    shapes[_BIAS] = (high,)
    shapes[_BASE_WEIGHT] = (high, wide) if kind == "linear" else (wide, high)
    for part, tensor in parts.items():
        _check_tensor(source, f"{_PREFIX}{module}.{part}", tensor, shapes[part], rank)
    scaling = module_scaling(source.config, module)
    bias = parts[_BIAS].float() * scaling if _BIAS in parts else None
    if spec is not None and kind == "embedding":
        scaling *= spec.embed_scale
    return ModuleDelta(module, kind, rank, scaling, lora_a, lora_b, bias)


def _kind_of(source: _Source, module: str, parts: Mapping[str, Tensor]) -> Kind:
    kinds = [kind for kind, names in _MATRICES.items() if any(name in parts for name in names)]
    given = [f"tensor '{_PREFIX}{module}.{part}'" for part in parts]
    if len(kinds) != 1:
        what = f"module {module!r} has {'two kinds of' if kinds else 'no'} LoRA matrices"
        allowed = "; or ".join(" and ".join(names) for names in _MATRICES.values())
        raise source.error(what, given, allowed, "save the adapter again")
    missing = [name for name in _MATRICES[kinds[0]] if name not in parts]
    if missing:
        what = f"module {module!r} lacks {missing[0]}"
        allowed = " and ".join(_MATRICES[kinds[0]])
        raise source.error(what, given, allowed, "copy the file again, or save the adapter again")
    return kinds[0]


def _check_targeted(source: _Source, module: str) -> None:
    if targets_module(source.config, module):
        return
    keys = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    values = ((key, getattr(source.config, key)) for key in keys)
    given = [f"LoRA for {module!r}", *(f"{k} = {v!r}" for k, v in values if v is not None)]
    raise source.error(
        f"{CONFIG_FILE} does not target module {module!r}, so PEFT would ignore its LoRA",
        given,
        "modules that the configuration targets",
        f"add the module to target_modules in {CONFIG_FILE}, or remove its tensors",
    )


def _check_lora_bias(source: _Source, module: str, kind: Kind, parts: Mapping[str, Tensor]) -> None:
    expected = source.config.lora_bias
    if expected and kind == "embedding":
        given = [f"lora_bias = true in {CONFIG_FILE}", f"LoRA for embedding {module!r}"]
        raise source.error("an embedding has no LoRA bias", given, "lora_bias = false")
    if expected != (_BIAS in parts):
        given = [f"lora_bias = {str(expected).lower()} in {CONFIG_FILE}"]
        given += [f"{'no ' if expected else ''}tensor '{_PREFIX}{module}.{_BIAS}'"]
        what = f"lora_bias and the tensors of module {module!r} disagree"
        raise source.error(what, given, "both or neither", f"correct {CONFIG_FILE}")


def _spec_of(source: _Source, module: str, kind: Kind) -> ModuleSpec | None:
    if source.specs is None:
        return None
    spec = source.specs.get(module)
    if spec is None:
        what = f"the base model has no module {module!r}{did_you_mean(module, source.specs)}"
        given, allowed = f"LoRA for {module!r}", f"{len(source.specs)} modules of the base model"
        raise source.error(what, given, allowed, "load it on the model it was trained on")
    if spec.kind != kind:
        what = f"module {module!r} of the base model is of another kind"
        allowed = f"LoRA of kind {spec.kind!r}"
        to_do = "load it on the model it was trained on"
        raise source.error(what, f"LoRA of kind {kind!r}", allowed, to_do)
    return spec


def _check_room(source: _Source, module: str, rank: int) -> None:
    if source.max_rank is not None and rank > source.max_rank:
        what = f"the rank of module {module!r} is too large"
        given, allowed = f"rank {rank}", f"at most {source.max_rank} (max_rank)"
        raise source.error(what, given, allowed, f"set max_rank to {rank} or more")


def _width(tensor: Tensor, axis: int) -> int:
    return tensor.shape[axis] if tensor.ndim == 2 else -1


def _check_tensor(
    source: _Source, key: str, tensor: Tensor, shape: tuple[int, ...], rank: int
) -> None:
    given = f"tensor {key!r} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.dtype not in _DTYPES or tensor.layout != torch.strided or tensor.is_meta:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise source.error("a tensor is not of a floating dtype", given, f"dense, {names}")
    if tuple(tensor.shape) != shape or 0 in shape:
        sizes = ", ".join("any" if size < 1 else str(size) for size in shape)
        allowed = f"[{sizes}], rank {rank} by {CONFIG_FILE}"
        if source.specs is not None:
            spec = source.specs[_split(key)[0]]
            allowed += f", in_features {spec.in_features} and out_features {spec.out_features}"
            allowed += " by the base model"
        to_do = "load it on the model it was trained on, with the configuration saved beside it"
        raise source.error("a tensor has the wrong shape", given, allowed, to_do)
    if not key.endswith(_BASE_WEIGHT) and not all(_finite_rows(tensor)):
        to_do = "train the adapter again: its training diverged"
        raise source.error("a tensor holds NaN or infinity", given, "finite float32 values", to_do)


def _finite_rows(tensor: Tensor) -> Iterator[bool]:
    # In pieces: the mask of a vocabulary's matrix is as large as the matrix.
    for start in range(0, len(tensor), 1024):
        yield bool(torch.isfinite(tensor[start : start + 1024].float()).all())
