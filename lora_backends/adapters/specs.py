"""The input and the result of a reader of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["linear", "embedding"]


@dataclass(frozen=True)
class FusedPart:
    """One projection inside a fused linear layer: `count` pieces of its output columns.

    Piece i has the columns [start + i * stride, start + i * stride + size).
    """

    name: str  # as a layer that is not fused calls it, e.g. "q_proj"
    start: int
    size: int
    stride: int = 0
    count: int = 1

    @property
    def width(self) -> int:
        """Number of its columns."""
        return self.size * self.count

    @property
    def columns(self) -> Tensor:
        """[width] int64: the index in the fused layer of each of its columns."""
        pieces = torch.arange(self.count)[:, None] * self.stride
        return (self.start + pieces + torch.arange(self.size)).flatten()


@dataclass(frozen=True)
class ModuleSpec:
    """The kind and the widths of one module of the base model."""

    kind: Kind
    in_features: int  # embedding: the size of the vocabulary
    out_features: int  # embedding: its dimension
    embed_scale: float = 1.0  # a scaled embedding (Gemma) multiplies its output by this
    transposed: bool = False  # the weight is stored [in_features, out_features] (Conv1D)
    parts: tuple[FusedPart, ...] = ()  # the projections that it fuses; (): none, or unknown


@dataclass(frozen=True)
class ExpertSpec:
    """The layout of one stacked parameter of the base model's experts."""

    num_experts: int
    in_features: int
    output_slices: tuple[int, ...]  # (I, I) for gate and up; else one width
    interleaved: bool = False  # even output columns are the gate's, odd ones are up's (gpt-oss)
    transposed: bool = False  # stored [num_experts, in_features, out_features]
    refusal: str | None = None  # why LoRA of these experts cannot be added; sizes mean nothing then

    @property
    def out_features(self) -> int:
        """Width of the output, all slices together."""
        return sum(self.output_slices)


@dataclass(frozen=True, eq=False)
class ModuleDelta:
    """One module's LoRA in one checkpoint: `delta(x) = scaling * B (A x) + bias`.

    An embedding's x is one-hot: its delta for token id i is `scaling * B A[:, i]`. With a
    magnitude m (DoRA), the module computes `m / ||W + scaling B A|| * (W x + delta(x))` plus its
    own bias, where the norm is that of each output's row.
    """

    module: str  # path inside the base model, e.g. "model.layers.0.self_attn.q_proj"
    kind: Kind
    rank: int  # > 0
    scaling: float  # alpha / r, or alpha / sqrt(r) for rsLoRA; embed_scale is folded in
    lora_a: Tensor  # [rank, in_features], floating, finite, on the CPU
    lora_b: Tensor  # [out_features, rank], floating, finite, on the CPU
    bias: Tensor | None  # [out_features] float32, scaling is folded in
    magnitude: Tensor | None = None  # [out_features] floating, finite: DoRA; it has no bias
    init: str | None = None  # "pissa" or "olora": PEFT takes its start off the base's weight


@dataclass(frozen=True, eq=False)
class ExpertDelta:
    """The LoRA of one stacked parameter of experts, as `ExpertWeights` without an axis of slots.

    For expert e and slice s, with a = s (0 where one A feeds every slice):
    `delta(x)[columns of s] = scalings[e, a] * lora_b[e, columns of s] (lora_a[e, a] x)`.
    """

    module: str  # path of the parameter, e.g. "model.layers.0.mlp.experts.gate_up_proj"
    lora_a: Tensor  # [num_experts or 1, num_a, rank, in_features], floating, finite, on the CPU
    lora_b: Tensor  # [num_experts or 1, out_features, rank], columns as the base model has them
    ranks: Tensor  # [num_experts, num_a] int32, at most `rank`; 0: not adapted
    scalings: Tensor  # [num_experts, num_a] float32

    @property
    def rank(self) -> int:
        """The largest rank of an expert."""
        return self.lora_a.shape[2]


@dataclass(frozen=True, eq=False)
class OwnParameter:
    """A parameter of the base model for which an adapter has a value of its own."""

    value: Tensor  # floating, on the CPU; of a head, its rows may be more or fewer than the base's
    alone: bool  # of this module alone (modules_to_save); else wherever the base model shares it
    plain: bool = False  # named as in the base model, which PEFT ignores where it wraps the module


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows of an embedding that an adapter replaces: `trainable_token_indices`."""

    ids: tuple[int, ...]  # [n] distinct rows
    values: Tensor  # [n, dim] floating, finite, on the CPU


@dataclass(frozen=True)
class Tying:
    """The parts that PEFT ties by `ensure_weight_tying` if the base model ties its head."""

    what: Literal["modules", "LoRA"]  # of the embedding: its own weight, or its LoRA transposed
    untargeted: tuple[str, ...] = ()  # paths of LoRA that only a tied head has


@dataclass(frozen=True)
class Promises:
    """The contents of a file by its `adapter_config.json`, with the base model's names."""

    saved: tuple[str, ...] = ()  # ends of paths of modules: modules_to_save
    tokens: tuple[tuple[str | None, tuple[int, ...]], ...] = ()
    """Ends of paths of embeddings, and ids of their rows; None: the token embedding."""
    bias: str = "none"  # all; lora_only: of the modules with LoRA
    untrained: tuple[str, ...] = ()  # paths of targeted modules that have no LoRA in the file
    is_old: bool = False  # its PEFT may be one that names no base_layer


@dataclass(frozen=True, eq=False)
class OwnModules:
    """The parts of an adapter that are not LoRA."""

    parameters: Mapping[str, OwnParameter] = field(default_factory=dict)  # by path of the parameter
    tokens: Mapping[str, TokenRows] = field(default_factory=dict)  # by path of the embedding
    invocation: tuple[int, ...] = ()  # aLoRA: it acts from their last place in the prompt on
    tying: Tying | None = None
    originals: Mapping[str, Tensor] = field(default_factory=dict)
    """By path of the parameter: copies of the base model's, which PEFT loads into it."""
    promises: Promises = Promises()
    task_type: str | None = None  # in adapter_config.json; PEFT runs aLoRA only for CAUSAL_LM

    def __bool__(self) -> bool:
        return bool(self.parameters or self.tokens or self.invocation)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One PEFT LoRA checkpoint, read and checked."""

    folder: Path
    modules: Mapping[str, ModuleDelta]  # by module path, in sorted order
    base_weights: Mapping[str, Tensor]
    """Module path to the full base weight `[out_features, in_features]` (embedding: `[vocab, dim]`)
    that the file holds beside the LoRA of an embedding or a head: it has to equal the base model's.
    """
    experts: Mapping[str, ExpertDelta] = field(default_factory=dict)
    """By path of the parameter, in sorted order."""
    own: OwnModules = field(default_factory=OwnModules)
    """Its parts that are not LoRA; `read_checkpoint` refuses them unless `own_modules` is True."""
