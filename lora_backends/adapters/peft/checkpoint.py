"""Reading a folder that PEFT's `save_pretrained` wrote, without trusting anything in it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from lora_backends.adapters.experts.names import ruled_names, take_experts
from lora_backends.adapters.experts.source import ExpertSource
from lora_backends.adapters.experts.tensors import read_experts
from lora_backends.adapters.files.folders import unchanged
from lora_backends.adapters.files.formats import (
    BY_TASK,
    CONFIG_FILE,
    GATHER,
    LONGEST_NAME,
    PARAMETRIZED,
    PICKLE_FILE,
    SAFETENSORS_FILE,
    check_beside,
    check_folder,
    format_of,
    names_in,
    no_config,
    no_weights,
)
from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.files.messages import problem
from lora_backends.adapters.files.pickle_file import read_pickle
from lora_backends.adapters.files.safetensors_file import read_safetensors
from lora_backends.adapters.files.shards import read_shards, shards_of
from lora_backends.adapters.files.tensor_checks import check_dtype, check_finite, described, typed
from lora_backends.adapters.peft.config import ALL_LINEAR, PeftLoraConfig, read_config
from lora_backends.adapters.peft.fused import (
    OtherName,
    as_base,
    order_unknown,
    other_names,
    without_second_names,
)
from lora_backends.adapters.peft.module_rules import (
    HEAD,
    ModuleRule,
    module_rules,
    targets_among,
    targets_parameter,
    ties_saved,
    ties_targets,
)
from lora_backends.adapters.peft.old_names import renamed, without_adapter_name
from lora_backends.adapters.peft.pissa import INITS_FROM_BASE
from lora_backends.adapters.peft.promises import check_tokens, check_untrained, promises_of
from lora_backends.adapters.peft.replacements import take_replacements
from lora_backends.adapters.peft.unused import without_unused
from lora_backends.adapters.read_options import ReadOptions
from lora_backends.adapters.specs import (
    Checkpoint,
    ExpertSpec,
    Kind,
    ModuleDelta,
    ModuleSpec,
    OwnModules,
    Tying,
)
from lora_backends.common.files import as_path, kind_of
from lora_backends.errors import (
    InvalidInputError,
    LoRABackendError,
    UnsupportedInputError,
    did_you_mean,
    shown,
)

_PREFIX = "base_model.model."

_BASE_WEIGHT = "base_layer.weight"
_BIAS = "lora_B.bias"
_MAGNITUDE = "lora_magnitude_vector"
_MATRICES: dict[Kind, tuple[str, str]] = {
    "linear": ("lora_A.weight", "lora_B.weight"),
    "embedding": ("lora_embedding_A", "lora_embedding_B"),
}
_PARTS = (*_MATRICES["linear"], _BIAS, *_MATRICES["embedding"], _MAGNITUDE, _BASE_WEIGHT)

# Tensors that only training reads: VeLoRA's projection, MonteCLoRA's sampler.
_TRAINING_ONLY = re.compile(r"\.(lora_velora_embed|lora_monteclora_sampler\.\w+)$")

# Tensors of features that change the result in other ways than a low-rank update; first hit wins.
_REFUSED = (
    (r"\.lora_diag\b", "kasa_config (KaSA)"),
    (r"\.lora_arrow\b", "arrow_config (Arrow)"),
    (r"\.(token_adapter\.|trainable_tokens_)", "trainable_token_indices"),
    (
        r"(?<!\bexperts)\.base_layer\.lora_",
        "target_parameters (several of one module that are not gate_up_proj and down_proj)",
    ),
    (r"\.base_layer\.out_proj\.lora_", "LoRA of torch.nn.MultiheadAttention"),
    (r"\.base_layer\.bias$", 'bias = "all" or "lora_only" (biases of the base model)'),
    (r"\.lora_E$|\.ranknum$", 'peft_type = "ADALORA"'),
    (
        r"\.(modules_to_save|original_module)\.|^(?!.*lora_).*(?<!base_layer)\.(weight|bias)$",
        "modules_to_save, or an embedding that was resized (whole base modules)",
    ),
)


@dataclass(frozen=True)
class _Source:
    """The file of the tensors, with its configuration and the base model."""

    path: Path
    config: PeftLoraConfig
    names: Collection[str]  # of the modules with LoRA
    rules: Mapping[str, ModuleRule]  # by module path, and by path of the weight
    options: ReadOptions
    others: Mapping[str, OtherName]  # paths that only a fused or split model has

    @cached_property
    def specs(self) -> Mapping[str, ModuleSpec] | None:
        """Every module that the file may name, by path; None if the base model is not known."""
        modules = self.options.modules
        if modules is None:
            return None
        return {**modules, **{path: name.spec for path, name in self.others.items()}}

    @property
    def rank_needed(self) -> int:
        """The `max_rank` that has room for every module of the file."""
        ranks: Counter[str] = Counter()
        for name in self.names:
            path = self.base_path(name)
            other = self.others.get(path)
            # Ranks of the parts of one module add up.
            if other is not None and other.is_part:
                path = other.places[0][0]
            ranks[path] += self.rule(name).rank
        # PiSSA's and OLoRA's start is subtracted by as much rank again.
        factor = 2 if self.config.init_lora_weights in INITS_FROM_BASE else 1
        return factor * max(ranks.values())

    def rule(self, module: str) -> ModuleRule:
        """Return the rule of a module, or of its weight alone."""
        rule = self.rules[module]
        weight = f"{module}.weight"
        if rule.targeted or not targets_parameter(self.config, weight):
            return rule
        return replace(self.rules[weight], targeted=True)

    def base_path(self, module: str) -> str:
        """Return the path that the base model has for a module of the file."""
        return module if self.specs is None else renamed(module, self.specs)

    def error(
        self, what: str, given: str | list[str], allowed: str, to_do: str | None = None
    ) -> InvalidInputError:
        return InvalidInputError(problem(self.path, what, given, allowed, to_do))


def read_checkpoint(
    folder: str | Path,
    modules: Mapping[str, ModuleSpec] | None = None,
    max_rank: int | None = None,
    limits: LoadLimits | None = None,
    experts: Mapping[str, ExpertSpec] | None = None,
    max_expert_rank: int | None = None,
    own_modules: bool = False,
) -> Checkpoint:
    """Read a PEFT LoRA checkpoint: `delta(x) = scaling * B (A x) + bias` for each module in it.

    Nothing is reproduced approximately, and no code in the folder is run. The tensors in the file
    decide which modules have LoRA: it may hold fewer than `target_modules` names, with a warning
    where the base model has them.

    Args:
        folder: holds `adapter_config.json` and `adapter_model.safetensors`, else
            `adapter_model.bin`; "~" is expanded.
        modules: of the base model, by path; None skips the comparison with it.
        max_rank: the largest rank that the caller has room for; None sets no limit.
        limits: of the size and cost of the files; None takes the defaults.
        experts: what the base model has at each stacked parameter of experts; None where `modules`
            is given says that it has none.
        max_expert_rank: as `max_rank`, of experts; None is the same as `max_rank`.
        own_modules: whether the caller runs what an adapter brings besides LoRA: saved modules,
            biases, rows of tokens, an invocation. Else they are refused.

    Returns:
        One `ModuleDelta` for each module with LoRA, one `ExpertDelta` for each stacked parameter of
        experts, and the copies of base weights in the file.

    Raises:
        InvalidInputError: a file is missing or damaged, beyond a limit, or contradicts itself or
            the base model.
        UnsupportedInputError: the adapter uses a feature that is not reproduced exactly.
    """
    limits = LoadLimits.of(limits)
    return read_with_options(
        folder, ReadOptions(modules, max_rank, limits, experts, max_expert_rank, own_modules)
    )


def read_with_options(folder: str | Path, options: ReadOptions) -> Checkpoint:
    """Read a PEFT LoRA checkpoint for a base model, as `read_checkpoint`."""
    path = as_path(folder, "the folder of a checkpoint")
    check_folder(path)
    if kind_of(path / CONFIG_FILE) is None:
        raise no_config(path)
    with unchanged(path):
        config = read_config(path / CONFIG_FILE, options.limits, options.own_modules)
        check_beside(path)
        with torch.device("cpu"):  # whatever the caller's default device is
            weights, tensors = read_tensors(path, options.limits)
    return checked_checkpoint(path, weights, config, tensors, options)


def checked_checkpoint(
    path: Path,
    weights: Path,
    config: PeftLoraConfig,
    tensors: Mapping[str, Tensor],
    options: ReadOptions,
) -> Checkpoint:
    """Return a checkpoint of a configuration and tensors, as `read_checkpoint` does."""
    replacements = OwnModules()
    _refuse_parametrized(weights, tensors)
    tensors = without_adapter_name(weights, tensors)
    if options.own_modules:
        replacements, tensors = take_replacements(weights, tensors, config)
    _refuse_features(weights, tensors)
    groups = _group(weights, tensors, may_be_empty=bool(replacements))
    if options.unused is not None:
        groups, replacements = without_unused(weights, groups, replacements, options.unused)
    parts_of, taken = take_experts(groups, options.modules, options.experts)
    # target_parameters names the weight of a module, which has a rule of its own.
    of_parameters = parts_of if config.target_parameters else ()
    names = [*parts_of, *(f"{name}.weight" for name in of_parameters), *ruled_names(taken)]
    rules = module_rules(
        config, names, path / CONFIG_FILE, options.limits, may_tie=options.own_modules
    )
    if options.own_modules and config.ensure_weight_tying:
        replacements, rules = _tied(path, config, options.limits, replacements, rules)
    others = other_names(options.modules or {})
    source = _Source(weights, config, parts_of, rules, options, others)
    deltas: dict[str, ModuleDelta] = {}
    for name in sorted(parts_of):
        delta = _read_delta(source, name, parts_of[name])
        # An old and a new name may mean one module.
        if delta.module in deltas:
            given = [f"LoRA for {name!r}", f"LoRA for {delta.module!r}"]
            raise source.error("two paths name one module of the base model", given, "one of them")
        deltas[delta.module] = delta
    copies = {
        source.base_path(name): parts[_BASE_WEIGHT]
        for name, parts in parts_of.items()
        if _BASE_WEIGHT in parts
    }
    used = {path for path in deltas if path in others}
    if used and options.modules is not None:
        deltas = as_base(deltas, others, options.modules, options.max_rank, source.rank_needed)
    of_experts = ExpertSource(weights, config, rules, options)
    checkpoint = Checkpoint(
        path,
        MappingProxyType(deltas),
        MappingProxyType(copies),
        MappingProxyType(read_experts(of_experts, taken)),
        replacements,
    )
    return _with_promises(source, checkpoint, used)


def _with_promises(source: _Source, checkpoint: Checkpoint, used: set[str]) -> Checkpoint:
    """Note the promises of the configuration; refuse a file that lacks one on any base model.

    `used` are the paths of `source.others` that the file has LoRA for.
    """
    config, replacements = source.config, checkpoint.own
    known = {*(source.options.modules or ()), *source.others}
    absent = sorted(known - {*checkpoint.modules, *used})
    config_path = checkpoint.folder / CONFIG_FILE
    # Without a base model nothing says which modules are targeted.
    targeted = targets_among(config, absent, config_path, source.options.limits) if absent else []
    targeted += [path for path in absent if targets_parameter(config, f"{path}.weight")]
    untrained = without_second_names(targeted, source.others, checkpoint.modules, used)
    stacked = [path for path in source.options.experts or () if path not in checkpoint.experts]
    untrained += [path for path in stacked if targets_parameter(config, path)]
    promises = promises_of(config, untrained)
    check_tokens(source.path, replacements, promises)
    check_untrained(source.path, config, untrained)
    return replace(checkpoint, own=replace(replacements, promises=promises))


def _tied(
    path: Path,
    config: PeftLoraConfig,
    limits: LoadLimits,
    replacements: OwnModules,
    rules: dict[str, ModuleRule],
) -> tuple[OwnModules, dict[str, ModuleRule]]:
    """Note the parts that PEFT ties; a tied head is adapted though PEFT drops it as a target."""
    if ties_saved(config):
        return replace(replacements, tying=Tying("modules")), rules
    if not ties_targets(config, path / CONFIG_FILE, limits):
        return replacements, rules
    heads = [name for name in (HEAD,) if name in rules and not rules[name].targeted]
    replacements = replace(replacements, tying=Tying("LoRA", tuple(heads)))
    return replacements, rules | {name: replace(rules[name], targeted=True) for name in heads}


def read_tensors(folder: Path, limits: LoadLimits) -> tuple[Path, dict[str, Tensor]]:
    """Return the file of a folder's tensors, the first of several, and the tensors by key."""
    for name, read in ((SAFETENSORS_FILE, read_safetensors), (PICKLE_FILE, read_pickle)):
        if kind_of(folder / name) is not None:
            return folder / name, read(folder / name, limits)
    shards = shards_of(names_in(folder))
    if shards:
        return folder / shards[0], read_shards(folder, shards, limits)
    raise no_weights(folder)


def _refuse_parametrized(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse LoRA stored as torch parametrizations: one tensor may hold many tasks."""
    found = [k for k in tensors if len(k) <= LONGEST_NAME and PARAMETRIZED.search(k)]
    if found:
        what = "its LoRA is stored as torch parametrizations, where one tensor may hold many tasks"
        given = [f"tensor {described(key, tensors[key])}" for key in found[:2]]
        given += [f"... and {len(found) - 2} more"] * (len(found) > 2)
        allowed = "one adapter, as PEFT's save_pretrained writes it"
        raise UnsupportedInputError(problem(path, what, given, allowed, BY_TASK))


def _refuse_features(path: Path, tensors: Mapping[str, Tensor]) -> None:
    features: dict[str, str] = {}
    for key, tensor in tensors.items():
        feature = _feature_of(key, tensor)
        if feature:
            features.setdefault(feature, f"{feature}, by tensor {described(key, tensor)}")
    if features:
        what = "the weights belong to features that this library cannot reproduce exactly"
        allowed = "LoRA that computes base(x) + scaling * (B A x + b)"
        to_do = "merge the adapter into its base model, or train it without these features"
        message = problem(path, what, list(features.values()), allowed, to_do)
        raise UnsupportedInputError(message)


def _feature_of(key: str, tensor: Tensor) -> str | None:
    # A file may hold a name of any length: no pattern runs over a long one.
    if not key.startswith(_PREFIX) or len(key) > LONGEST_NAME:
        return None
    name = key.removeprefix(_PREFIX)
    for pattern, feature in _REFUSED:
        if re.search(pattern, name):
            return feature
    in_experts = tensor.ndim == 3 and "experts" in name.split(".")
    if tensor.ndim > 2 and ".lora_" in name and not (in_experts or _TRAINING_ONLY.search(name)):
        return "LoRA of a convolution"
    return None


def _group(
    path: Path, tensors: Mapping[str, Tensor], may_be_empty: bool = False
) -> dict[str, dict[str, Tensor]]:
    parts_of: dict[str, dict[str, Tensor]] = {}
    strange = []
    for key, tensor in tensors.items():
        module, part = _split(key)
        # A second name for one part is not understood: nothing says which tensor counts.
        if part and part not in parts_of.get(module, {}):
            parts_of.setdefault(module, {})[part] = tensor
        elif not _TRAINING_ONLY.search(key):
            strange.append(key)
    if strange:
        shape = format_of(strange)
        what = "some tensors are not understood"
        if shape is not None:
            what += f": they are named in the format of {shape}"
        facts = [f"tensor {shown(key)}" for key in strange[:5]] + ["..."] * (len(strange) > 5)
        allowed = f"{_PREFIX}<module path>.<one of {', '.join(_PARTS)}>"
        to_do = "save the adapter with PEFT's save_pretrained, or convert it to PEFT's format"
        raise InvalidInputError(problem(path, what, facts, allowed, to_do))
    if not parts_of and not may_be_empty:
        given = f"{len(tensors)} tensors"
        allowed = "at least one module with LoRA"
        raise InvalidInputError(problem(path, "there are no LoRA tensors", given, allowed))
    return parts_of


def _split(key: str) -> tuple[str, str | None]:
    name = key.removeprefix(_PREFIX)
    if name.endswith(f".{_MAGNITUDE}.weight"):  # PEFT saves it without ".weight" and reads both
        name = name.removesuffix(".weight")
    if key.startswith(_PREFIX) and len(key) <= LONGEST_NAME and name.isprintable():
        for part in _PARTS:
            if name.endswith(f".{part}"):
                return name.removesuffix(f".{part}"), part
        # Some trainers leave out ".weight" for tensors with an axis of experts.
        module, _, part = name.rpartition(".")
        if part in ("lora_A", "lora_B") and "experts" in module.split("."):
            return module, f"{part}.weight"  # a tensor with an axis of experts is no module
    return key, None


def _read_delta(source: _Source, module: str, parts: Mapping[str, Tensor]) -> ModuleDelta:
    kind = _kind_of(source, module, parts)
    _check_targeted(source, module, kind)
    _check_optional_parts(source, module, kind, parts)
    spec = _spec_of(source, module, kind)
    rule = source.rule(module)
    rank = rule.rank
    _check_room(source, module, rank)
    name_a, name_b = _MATRICES[kind]
    lora_a, lora_b = parts[name_a], parts[name_b]
    wide = _width(lora_a, 1) if spec is None else spec.in_features
    high = _width(lora_b, 0) if spec is None else spec.out_features
    shapes: dict[str, tuple[int, ...]] = {name_a: (rank, wide), name_b: (high, rank)}
    # FSDP2 splits rows: in a shard, A has fewer than the rank, and B still has all its columns.
    is_shard = lora_a.ndim == lora_b.ndim == 2 and lora_a.shape[0] < lora_b.shape[1] == rank
    shapes[_BIAS] = shapes[_MAGNITUDE] = (high,)
    shapes[_BASE_WEIGHT] = (high, wide) if kind == "linear" else (wide, high)
    for part, tensor in parts.items():
        _check_tensor(source, f"{_PREFIX}{module}.{part}", tensor, shapes[part], rank, is_shard)
    scaling = rule.scaling
    # PEFT scales the bias with B: scaling * (B A x + b).
    bias = parts[_BIAS].float() * scaling if _BIAS in parts else None
    if spec is not None and kind == "embedding":
        scaling *= spec.embed_scale
    module, magnitude = source.base_path(module), parts.get(_MAGNITUDE)
    # PEFT saves the base weight of an adapted head as the initialisation has left it.
    is_changed = kind == "linear" and _BASE_WEIGHT not in parts
    init = _init_from_base(source, spec) if is_changed else None
    return ModuleDelta(module, kind, rank, scaling, lora_a, lora_b, bias, magnitude, init)


def _init_from_base(source: _Source, spec: ModuleSpec | None) -> str | None:
    """Return the initialisation that took a part off the base weight, or None."""
    init = source.config.init_lora_weights
    if not isinstance(init, str) or init not in INITS_FROM_BASE:
        return None
    if spec is not None and spec.transposed and init == "olora":
        what = "the adapter uses a feature that this library cannot reproduce exactly"
        given = 'init_lora_weights = "olora" with a weight that is stored transposed (Conv1D)'
        raise UnsupportedInputError(problem(source.path, what, given, "linear layers"))
    return init


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


def _check_targeted(source: _Source, module: str, kind: Kind) -> None:
    only_linear = str(source.config.target_modules).lower() == ALL_LINEAR
    if source.rule(module).targeted and not (only_linear and kind == "embedding"):
        return
    keys = (
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "modules_to_save",
    )
    values = ((key, getattr(source.config, key)) for key in keys)
    given = [f"LoRA for {module!r}", *(f"{k} = {shown(v)}" for k, v in values if v is not None)]
    raise source.error(
        f"{CONFIG_FILE} does not target module {module!r}, so PEFT would ignore its LoRA",
        given,
        "modules that the configuration targets",
        f"add the module to target_modules in {CONFIG_FILE}, or remove its tensors",
    )


def _check_optional_parts(
    source: _Source, module: str, kind: Kind, parts: Mapping[str, Tensor]
) -> None:
    """Refuse a bias or magnitude that the configuration does not name, or that the file lacks."""
    if source.config.lora_bias and kind == "embedding":
        given = [f"lora_bias = true in {CONFIG_FILE}", f"LoRA for embedding {module!r}"]
        raise source.error("an embedding has no LoRA bias", given, "lora_bias = false")
    for key, label, part in (
        ("lora_bias", "lora_bias", _BIAS),
        ("use_dora", "use_dora (DoRA)", _MAGNITUDE),
    ):
        expected = getattr(source.config, key)
        if expected != (part in parts):
            given = [f"{key} = {str(expected).lower()} in {CONFIG_FILE}"]
            given += [f"{'no ' if expected else ''}tensor '{_PREFIX}{module}.{part}'"]
            what = f"{label} and the tensors of module {module!r} disagree"
            raise source.error(what, given, "both or neither", f"correct {CONFIG_FILE}")


def _spec_of(source: _Source, module: str, kind: Kind) -> ModuleSpec | None:
    if source.specs is None or source.options.modules is None:
        return None
    spec = source.specs.get(source.base_path(module))
    if spec is None:
        raise _missing_module(source, source.options.modules, module)
    if spec.transposed and not source.rules[module].targeted:
        what = "the adapter uses a feature that this library cannot reproduce exactly"
        given = f"target_parameters with the weight of {module!r}, which is stored transposed"
        allowed = f"target_modules for {module!r}"
        raise UnsupportedInputError(problem(source.path, what, given, allowed))
    if spec.kind != kind:
        what = f"module {module!r} of the base model is of another kind"
        allowed = f"LoRA of kind {spec.kind!r}"
        to_do = "load it on the model it was trained on"
        raise source.error(what, f"LoRA of kind {kind!r}", allowed, to_do)
    return spec


def _missing_module(
    source: _Source, specs: Mapping[str, ModuleSpec], module: str
) -> LoRABackendError:
    missing = [name for name in source.names if source.base_path(name) not in (source.specs or ())]
    facts = [f"LoRA for {len(source.names)} modules, {len(missing)} of which the base model lacks"]
    mine, theirs = _highest_layer(missing), _highest_layer(specs)
    fused = order_unknown(source.base_path(module), specs)
    if fused is not None:
        what = f"the base model computes {module!r} with others as {fused!r}"
        facts.append(f"LoRA for {module!r}")
        allowed = "fused modules of classes whose order of columns this library knows"
        to_do = "load it on the model it was trained on"
        return UnsupportedInputError(problem(source.path, what, facts, allowed, to_do))
    if mine > theirs >= 0:
        what = "the base model has fewer layers than the adapter"
        facts.append(f"LoRA for layer {mine}; the base model's last layer is {theirs}")
    else:
        what = f"the base model has no module {module!r}{did_you_mean(module, specs)}"
        facts.append(f"LoRA for {module!r}")
    allowed = f"{len(specs)} modules of the base model"
    return source.error(what, facts, allowed, "load it on the model it was trained on")


def _highest_layer(modules: Iterable[str]) -> int:
    """Return the highest number among components of paths, or -1."""
    numbers = (re.search(r"\.(\d{1,9})\.", module) for module in modules)
    return max((int(number[1]) for number in numbers if number), default=-1)


def _check_room(source: _Source, module: str, rank: int) -> None:
    if source.options.max_rank is not None and rank > source.options.max_rank:
        what = f"the rank of module {module!r} is too large"
        given, allowed = f"rank {rank}", f"at most {source.options.max_rank} (max_rank)"
        to_do = f"set max_rank to {source.rank_needed} or more"  # enough for all modules
        raise source.error(what, given, allowed, to_do)


def _width(tensor: Tensor, axis: int) -> int:
    return tensor.shape[axis] if tensor.ndim == 2 else -1


def _check_tensor(
    source: _Source, key: str, tensor: Tensor, shape: tuple[int, ...], rank: int, is_shard: bool
) -> None:
    check_dtype(source.error, key, tensor)
    if tuple(tensor.shape) != shape or 0 in shape:
        sizes = ", ".join("any" if size < 1 else str(size) for size in shape)
        allowed = f"[{sizes}], rank {rank} by {CONFIG_FILE}"
        if source.specs is not None:
            spec = source.specs[source.base_path(_split(key)[0])]
            allowed += f", in_features {spec.in_features} and out_features {spec.out_features}"
            allowed += " by the base model"
        what = "a tensor has the wrong shape"
        to_do = "load it on the model it was trained on, with the configuration saved beside it"
        if is_shard or 0 in tensor.shape or (tensor.ndim == 1 and len(shape) == 2):
            what = "a tensor is the part that one process of DeepSpeed ZeRO-3 or FSDP has of it"
            to_do = GATHER
        raise source.error(what, typed(key, tensor), allowed, to_do)
    # Base weights are compared with the model's, which may hold any value.
    if not key.endswith(_BASE_WEIGHT):
        check_finite(source.error, key, tensor)
