"""Reads an adapter into vLLM's `LoRAModel`, and its other parts into `Extras`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.peft.checkpoint import checked_checkpoint
from lora_backends.adapters.peft.config import checked_config, unknown_keys
from lora_backends.adapters.peft.dora import BaseLayer, dora_terms
from lora_backends.adapters.peft.pissa import without_start
from lora_backends.adapters.read_options import ReadOptions
from lora_backends.adapters.specs import Checkpoint, ModuleDelta, ModuleSpec, TokenRows
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.integrations.vllm.adapters.base_weights import base_layer_of
from lora_backends.integrations.vllm.adapters.targets import Target, Targets

PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of init_lora_weights with which PEFT leaves the base weights as they are."""

OTHER_KINDS = (
    *("use_dora", "lora_bias", "alora_invocation_tokens", "trainable_token_indices"),
    *("layer_replication", "use_qalora", "use_bdlora", "arrow_config", "kasa_config"),
    "megatron_config",
)
"""Fields of a configuration that vLLM refuses or ignores."""

HEADS = ("classifier", "score")
"""Saved modules (modules_to_save) that vLLM loads itself."""


@dataclass(frozen=True)
class Factors:
    """Scales and bias of one module, for all of its outputs, on every process."""

    scales: Tensor | None = None  # [out_features] float32: multiplies base and delta (DoRA)
    bias: Tensor | None = None  # [out_features] float32, added after the scales


@dataclass(frozen=True)
class Extras:
    """The parts of an adapter that a `LoRAModel` has no place for; kept with it."""

    factors: Mapping[Target, Factors] = field(default_factory=dict)
    invocation: tuple[int, ...] = ()  # aLoRA: the adapter applies from their last place on
    tokens: bool = False  # rows of embeddings are replaced (trainable_token_indices)
    parts: Mapping[str, Any] = field(default_factory=dict)  # of a blend: the `LoRARequest` by
    # which each name was loaded, None for a folder


NO_EXTRAS = Extras()


def extras_of(lora: Any) -> Extras:
    """Return the `Extras` of a `LoRAModel`."""
    extras: Extras = getattr(lora, "lora_backends_extras", NO_EXTRAS)
    return extras


def needs_our_reader(config: Mapping[str, Any]) -> bool:
    """Return whether vLLM's loader refuses or misreads an adapter of this configuration."""
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in PLAIN_STARTS:
        return True
    if any(config.get(key) for key in OTHER_KINDS) or config.get("bias", "none") != "none":
        return True
    if set(config.get("modules_to_save") or ()) - set(HEADS):
        return True
    if config.get("peft_type", "LORA") != "LORA" or any(unknown_keys(config)):
        return True  # it refuses unknown fields by name, vLLM ignores them
    from vllm.lora.peft_helper import PEFTHelper

    patterns = config.get("rank_pattern") or config.get("alpha_pattern")
    return bool(patterns) and not hasattr(PEFTHelper, "get_rank_and_scaling")  # before 0.31


def load(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    worker: Any,
    adapter_id: int,
    source: Path = Path("<memory>"),
    is_3d: bool = False,
    by_our_reader: bool = False,
) -> Any:
    """Return an adapter as `LoRAModelManager.add_adapter` takes it, on the host.

    With tensor parallelism every process must call it in the same order, because DoRA and PiSSA
    gather base weights. The engine does not change.

    Args:
        config: the contents of `adapter_config.json`.
        tensors: by PEFT's keys; they are copied.
        worker: vLLM's `WorkerLoRAManager`.
        adapter_id: of the adapter in vLLM.
        source: of the tensors, for errors.
        is_3d: whether experts are stacked, as `LoRARequest.is_3d_lora_weight` says.
        by_our_reader: read plain LoRA with our reader, too, which checks shapes and values.

    Returns:
        vLLM's `LoRAModel`, with its `Extras`.

    Raises:
        InvalidInputError: the adapter contradicts itself or the base model.
        UnsupportedInputError: a feature that cannot be reproduced here, or a module that vLLM
            would ignore.
        ValueError: vLLM refuses it.
    """
    manager = worker._adapter_manager
    targets = Targets(manager)
    if not (by_our_reader or needs_our_reader(config)):
        lora = _by_vllm(config, tensors, worker, targets, adapter_id)
    else:
        lora = _Loading(worker, targets, source).read(config, tensors, adapter_id)
    lora.is_3d_lora_weight = is_3d
    check(worker, lora, source)
    return lora


def check(worker: Any, lora: Any, source: Path) -> None:
    """Refuse an adapter whose layout does not fit, or that has a module which vLLM would ignore.

    Raises:
        UnsupportedInputError: a module that vLLM would ignore.
        ValueError: vLLM refuses the layout.
    """
    manager = worker._adapter_manager
    Targets(manager).check(source, lora.loras)
    for name in (  # of newer versions
        "_validate_moe_lora_format",
        "_validate_modules_to_save",
        "_validate_token_classification_lora",
        "_validate_classification_head_lora",
    ):
        if hasattr(manager, name):
            getattr(manager, name)(lora)


def check_shapes(checkpoint: Checkpoint, worker: Any, source: Path) -> None:
    """Refuse LoRA of other widths than the layers', where those are known.

    Raises:
        InvalidInputError: a module of the adapter has other widths than its layer.
    """
    loading = _Loading(worker, Targets(worker._adapter_manager), source)
    for path, delta in checkpoint.modules.items():
        loading._check(delta, loading.targets.name_of(path))


def _by_vllm(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    worker: Any,
    targets: Targets,
    adapter_id: int,
) -> Any:
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_dict(
        {**config, "vllm_max_position_embeddings": worker.max_position_embeddings}
    )
    helper.validate_legal(worker.lora_config)
    return worker._lora_model_cls.from_lora_tensors(
        lora_model_id=adapter_id,
        tensors={key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()},
        peft_helper=helper,
        device="cpu",
        dtype=worker.lora_config.lora_dtype,
        model_vocab_size=worker.vocab_size,
        weights_mapper=targets.renames,
        skip_prefixes=list(targets.skipped) or None,
    )


class _Loading:
    """One adapter that our reader reads."""

    def __init__(self, worker: Any, targets: Targets, source: Path) -> None:
        self.manager = worker._adapter_manager
        self.dtype = worker.lora_config.lora_dtype
        self.max_rank = worker.lora_config.max_lora_rank
        self.targets, self.source = targets, source
        self.weights: dict[str, tuple[Tensor, Tensor]] = {}  # A and scaled B by vLLM's name
        self.factors: dict[Target, Factors] = {}

    def read(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], id_: int) -> Any:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        options = ReadOptions(
            modules=None,
            max_rank=self.max_rank,
            limits=LoadLimits.of(None),
            experts=None,
            max_expert_rank=None,
            own_modules=True,
        )
        peft_config = checked_config(dict(config), self.source, own_modules=True)
        host = {name: tensors[name].detach().to("cpu", copy=True) for name in sorted(tensors)}
        checkpoint = checked_checkpoint(self.source, self.source, peft_config, host, options)
        self._refuse(checkpoint)
        # check everything first, so that a refused adapter gathers no weights
        names = {path: self.targets.name_of(path) for path in checkpoint.modules}
        names |= {path: self.targets.name_of(path) for path in checkpoint.own.tokens}
        self.targets.check(self.source, names.values())
        for path, delta in checkpoint.modules.items():
            self._check(delta, names[path])
        for path, delta in checkpoint.modules.items():
            self._add(delta, names[path])
        for path, weight in checkpoint.base_weights.items():
            self._check_copy(path, weight)
        for path, rows in checkpoint.own.tokens.items():
            self._add_tokens(names[path], rows)
        loras = {
            name: LoRALayerWeights(name, a.shape[0], 1, a.to(self.dtype), b.to(self.dtype), 1.0)
            for name, (a, b) in self.weights.items()
        }
        lora = LoRAModel(id_, max((each.rank for each in loras.values()), default=0), loras)
        lora.lora_backends_extras = Extras(
            self.factors, checkpoint.own.invocation, bool(checkpoint.own.tokens)
        )
        return lora

    def _refuse(self, checkpoint: Checkpoint) -> None:
        own, given = checkpoint.own, []
        if own.promises.saved:
            given.append(f"modules_to_save ({', '.join(own.promises.saved)})")
        if own.promises.bias != "none":
            given.append(f"bias = {own.promises.bias!r}: biases of the base model")
        elif own.parameters and not own.promises.saved:
            given.append(f"whole parameters ({', '.join([*own.parameters][:3])})")
        if own.tying is not None and own.tying.what == "LoRA":
            given.append("LoRA that the head shares with the embedding (ensure_weight_tying)")
        if checkpoint.experts:  # their layout follows from the base model, which is not at hand
            given.append(f"stacked experts ({next(iter(checkpoint.experts))}) beside these")
        if own.tokens and own.invocation:
            given.append("trainable_token_indices beside alora_invocation_tokens")
        if own.invocation and self.manager.is_pooling_model:
            given.append("alora_invocation_tokens in a pooling model: PEFT has it for causal ones")
        wrappers = getattr(self.manager, "punica_wrapper_mapping", {}).values()
        if own.invocation and any(wrapper.takes_embeddings for wrapper in wrappers):
            given.append("alora_invocation_tokens with enable_prompt_embeds: it needs token ids")
        if given:
            raise UnsupportedInputError(
                f"the adapter uses features that are not supported inside vLLM\n"
                f"  file: {self.source}\n  given: {'; '.join(given)}\n"
                f"  to do: merge the adapter into its base model, or train it without them"
            )

    @property
    def _is_tied(self) -> bool:
        """Whether the head has the embedding's weight, as the model or its text part says."""
        config = getattr(self.manager.model, "config", None)
        text = getattr(config, "get_text_config", lambda: None)()
        return any(getattr(each, "tie_word_embeddings", False) for each in (config, text))

    def _base_layer(self, name: str) -> BaseLayer:
        target = self.targets.find(name)
        assert target is not None
        return base_layer_of(self.manager, target)

    def _check(self, delta: ModuleDelta, name: str) -> None:
        target = self.targets.find(name)
        if target is None:
            return
        self._check_shape(delta, target)
        if "experts" in name.split("."):
            if delta.magnitude is not None or delta.bias is not None:
                raise self._refused(f"use_dora or lora_bias of experts ({name})")
            if delta.init:
                raise self._refused(f"init_lora_weights = {delta.init!r} of experts ({name})")
        if delta.init and self._is_tied and name.endswith("lm_head"):
            # PEFT subtracts the initial product from the embedding's weight, too
            raise self._refused(f"init_lora_weights = {delta.init!r} of a tied head ({name})")
        if delta.magnitude is not None:
            self._check_scales(target)

    def _add(self, delta: ModuleDelta, name: str) -> None:
        target = self.targets.find(name)
        if target is None:
            return  # of another pipeline stage
        if delta.init:
            delta = without_start(delta, lambda _: self._base_layer(name), self.max_rank)
        if delta.magnitude is not None:
            spec = ModuleSpec(delta.kind, delta.lora_a.shape[1], delta.lora_b.shape[0])
            scales, bias = dora_terms(delta, spec, lambda _: self._base_layer(name))
            self.factors[target] = Factors(scales.float(), None if bias is None else bias.float())
        elif delta.bias is not None:
            self.factors[target] = Factors(None, delta.bias.float())
        self.weights[name] = delta.lora_a, delta.lora_b.float() * delta.scaling

    def _check_shape(self, delta: ModuleDelta, target: Target) -> None:
        """Refuse LoRA of other widths than the layer's, where those are known."""
        wide, tall = _widths(self.manager.modules[target.layer], target.piece)
        given = delta.lora_a.shape[1], delta.lora_b.shape[0]
        for mine, theirs in zip(given, (wide, tall), strict=True):
            if theirs is not None and mine != theirs:
                raise InvalidInputError(
                    f"the LoRA of {delta.module!r} does not fit the base model\n"
                    f"  file: {self.source}\n  given: in_features {given[0]}, out_features "
                    f"{given[1]}\n  allowed: {wide or 'any'} and {tall or 'any'}\n"
                    f"  to do: load it on the model it was trained on"
                )

    def _check_scales(self, target: Target) -> None:
        module = self.manager.modules[target.layer]
        if getattr(module, "_enable_aux_cuda_stream", False):
            raise self._refused("use_dora with VLLM_LORA_ENABLE_DUAL_STREAM: it scales the base")

    def _refused(self, given: str) -> UnsupportedInputError:
        return UnsupportedInputError(
            f"the adapter uses a feature that is not supported in this engine\n"
            f"  file: {self.source}\n  given: {given}\n"
            f"  to do: change the engine's setting, or merge the adapter into its base model"
        )

    def _check_copy(self, path: str, weight: Tensor) -> None:
        """Refuse an adapter whose checkpoint holds a base weight other than the model's."""
        name = self.targets.name_of(path)
        target = self.targets.find(name)
        if target is None:
            return
        base = base_layer_of(self.manager, target).weight
        base = base if base.shape == weight.shape else base.T
        if base.shape != weight.shape or not torch.equal(weight.to(base.device, base.dtype), base):
            raise self._refused(f"a base weight of its own at {path!r}, as of a resized embedding")

    def _add_tokens(self, name: str, rows: TokenRows) -> None:
        """Replace rows of an embedding by LoRA: A selects tokens, and B adds the differences."""
        names = [name]
        if self._is_tied:
            names += [each for each in self.manager.modules if each.endswith("lm_head")]
            if len(names) == 1:
                raise self._refused("trainable_token_indices: vLLM runs no LoRA of the tied head")
        for each in dict.fromkeys(names):
            self._add_rows(each, rows)

    def _add_rows(self, name: str, rows: TokenRows) -> None:
        count = len(rows.ids)
        target = self.targets.find(name)
        if target is None:
            return
        if name in self.weights:
            raise self._refused(f"trainable_token_indices beside LoRA of {name}")
        if count > self.max_rank:
            raise InvalidInputError(
                f"{count} rows of trainable_token_indices take as many ranks at {name!r}\n"
                f"  allowed: at most {self.max_rank}\n"
                f"  to do: set max_lora_rank of vLLM to {count} or more"
            )
        layer = base_layer_of(self.manager, target).weight
        module = self.manager.modules[target.layer]
        is_head = hasattr(module, "sharded_to_full_mapping")
        table = layer if is_head else layer.T  # [vocabulary, dim]
        ids = torch.tensor(rows.ids, device=table.device)
        if int(ids.max()) >= table.shape[0] or rows.values.shape[1] != table.shape[1]:
            raise InvalidInputError(
                f"rows of trainable_token_indices do not fit {name!r}\n  file: {self.source}\n"
                f"  given: ids to {int(ids.max())}, width {rows.values.shape[1]}\n"
                f"  allowed: {list(table.shape)}"
            )
        change = rows.values.to(table.device, torch.float32) - table[ids].float()
        one_hot = torch.zeros(count, table.shape[0], device=table.device)
        one_hot[torch.arange(count, device=table.device), ids] = 1
        a, b = (change, one_hot.T) if is_head else (one_hot, change.T)
        self.weights[name] = a.cpu(), b.cpu().contiguous()


def _widths(module: Any, piece: int | None) -> tuple[int | None, int | None]:
    """Return in_features and out_features of one module of a layer, None where not known."""
    base = module.base_layer
    if hasattr(module, "sharded_to_full_mapping"):
        return module.hidden_size, base.org_vocab_size
    if hasattr(base, "org_vocab_size"):
        return base.org_vocab_size, base.embedding_dim
    wide = getattr(base, "input_size", None)
    if piece is None:
        return wide, getattr(base, "output_size", None)
    pieces = getattr(base, "output_sizes", ())
    return wide, pieces[piece] if len(pieces) == getattr(module, "n_slices", 0) else None
