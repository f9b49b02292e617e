"""`LoRACase`: the structure of a call and a seed, from which all tensors follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, TypeAlias

import torch

from lora_backends import features
from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.eight_bit import ScaleBlock
from lora_backends.testing.cases.eight_bit import ANY_BYTE, StoredLayer
from lora_backends.testing.cases.inputs import LoRAInputs, guarded
from lora_backends.weights import LoRAWeights

LARGEST_EXACT = 256
"""Integers up to here are exact in bfloat16; |h| of an integer case stays within."""

FEW = 8
"""The most nonzero values of a sparse row."""

DRAWN = 262_139
"""Values that are drawn for a tensor: a prime, so that no tile or row repeats with them."""

Values: TypeAlias = Literal["real", "sparse", "integer"]
"""real: normal values; sparse: the same, but rows of x and of dL/dy are sparse, so that the bound
stays narrow however wide they are; integer: small integers whose sums are exact."""


class ReproducibleCase:
    """The base of cases of dense layers and of experts, which are dataclasses."""

    slots: tuple[int, ...]
    ranks: tuple[Any, ...]
    token_scales: bool
    stored: torch.dtype | None
    dtype: torch.dtype
    weights_pad: int
    output_slices: tuple[int, ...]
    max_rank: int
    values: Values
    seed: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens, those without an adapter included."""
        return len(self.slots)

    @property
    def num_slots(self) -> int:
        """Number of slots of the weights."""
        return len(self.ranks)

    @property
    def is_integer(self) -> bool:
        """Whether all sums are exact, so that the result is unique bit for bit."""
        return self.values == "integer"

    def batch(self) -> LoRABatch:
        """Return the batch."""
        scales = None
        if self.token_scales:
            # of a generator of their own, so that x and the weights stay the same
            scales = token_factors((self.num_tokens,), self.seed, self.is_integer)
        return LoRABatch(self.slots, self.num_slots, scales)

    def draw_x(self, rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
        """Return x; with integers, all but `LARGEST_EXACT` columns are 0, the last ones not."""
        if self.values == "sparse":
            return sparse_normals((rows, width), generator)
        if not self.is_integer:
            return normals((rows, width), generator)
        x = integers((rows, width), generator)
        ends = min(width, LARGEST_EXACT // 4)  # where a tile is cut off
        order = torch.randperm(width, generator=generator, device="cpu")
        x[:, order[order < width - ends][LARGEST_EXACT - ends :]] = 0
        return x

    def stacks_of(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        a_ranks: torch.Tensor,
        b_ranks: torch.Tensor,
        device: torch.device | str,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return A and B as they are stored, with garbage beyond ranks, and the fields of scales.

        Arguments as in `StoredLayer`.
        """
        if self.stored is not None:
            layer = StoredLayer(self, a, b, a_ranks, b_ranks)
            return layer.a, layer.b, layer.fields(device, self.weights_pad)
        index = torch.arange(self.max_rank, device="cpu")
        widths = torch.tensor(self.output_slices, device="cpu")
        a[index >= a_ranks[..., None]] = float("nan")
        b[index >= b_ranks.repeat_interleave(widths, -1)[..., None]] = float("nan")
        return a, b, {}

    def guarded_stack(
        self, values: torch.Tensor, device: torch.device | str, pad: int
    ) -> torch.Tensor:
        """Return a stack on the device inside guards."""
        if self.stored is None:
            return guarded(values.to(device, self.dtype), pad, float("nan"))
        # torch fills bytes, not float8
        return guarded(values.to(device), pad, ANY_BYTE).view(self.stored)

    def needs(self) -> frozenset[str]:
        """Return the features that a backend must declare to run the case."""
        fields_of = {
            features.TOKEN_SCALES: "token_scales",
            features.OUTPUT_SCALES: "output_scales",
            features.SLICE_TENSORS: "split",
            features.EIGHT_BIT: "stored",
        }
        return frozenset(name for name, field in fields_of.items() if getattr(self, field, None))

    def __repr__(self) -> str:
        """Return the expression that makes the case; defaults are left out."""
        arguments = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)  # type: ignore[arg-type]
            if field.default is MISSING or getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(arguments)})"


@dataclass(frozen=True, repr=False)
class LoRACase(ReproducibleCase):
    """One call, reproducible from its ``repr``: structure is written out, values follow a seed.

    Two tokens of slot 0 and one without adapter, one slice of 8 columns, rank 2 of at most 4:

        LoRACase(slots=(0, -1, 0), ranks=((2,),), max_rank=4, in_features=5, output_slices=(8,),
                 scalings=((0.5,),), dtype=torch.float16)

    NaN fills values beyond each rank, scalings of rank 0, the guards around every view, and rows
    of x without an adapter.
    """

    slots: tuple[int, ...]  # slot per token, -1 for none
    ranks: tuple[tuple[int, ...], ...]  # [num_slots][num_slices], 0..max_rank
    max_rank: int  # padded rank width
    in_features: int  # width of x; the vocabulary of an embedding
    output_slices: tuple[int, ...]  # width per slice
    scalings: tuple[tuple[float, ...], ...]  # [num_slots][num_slices]
    dtype: torch.dtype = torch.float32  # of x and the weights
    base: torch.dtype | None = None  # of base_output; None: without one
    bias: bool = False
    wide_bias: bool = False  # the bias is float32 whatever the dtype of the weights
    x_pad: int = 0  # guard columns on either side of x
    base_pad: int = 0  # guard columns on either side of base_output
    weights_pad: int = 0  # guard columns beside the rows of lora_a, lora_b and bias
    token_scales: bool = False  # the batch has a scale for each token
    output_scales: bool = False  # the layer has a scale for each slot and column
    split: Literal["", "a", "b", "ab"] = ""  # which stacks are tuples of one tensor per slice
    stored: torch.dtype | None = None  # 8-bit dtype of lora_a and lora_b, which have scales then
    scale_block: ScaleBlock = (1, None)  # rows and columns that share a scale
    values: Values = "real"
    seed: int = 0

    def build(self, device: torch.device | str = "cpu") -> LoRAInputs:
        """Return the tensors; they depend on the case alone, never on the device."""
        generator = torch.Generator().manual_seed(self.seed)
        draw = integers if self.is_integer else normals
        num_slices, out_features = len(self.output_slices), sum(self.output_slices)
        a_shape = (self.num_slots, num_slices, self.max_rank, self.in_features)
        x = self.draw_x(self.num_tokens, self.in_features, generator)
        # a backend that multiplies a masked row shows NaN
        x[[slot == NO_ADAPTER for slot in self.slots]] = float("nan")
        a = draw(a_shape, generator)
        largest = 3 if self.token_scales or self.output_scales else 15  # sums stay exact
        largest = largest if self.stored is None else 3  # and so do values of 8 bits
        b = draw((self.num_slots, out_features, self.max_rank), generator, largest)
        bias = draw((self.num_slots, out_features), generator)
        base = base_values((self.num_tokens, out_features), generator, self.is_integer)
        token_ids = torch.randint(
            self.in_features, (self.num_tokens,), generator=generator, device="cpu"
        )
        ranks = torch.tensor(self.ranks, dtype=torch.int32, device="cpu").reshape(
            self.num_slots, num_slices
        )
        a, b, eight = self.stacks_of(a, b, ranks, ranks, device)
        if self.stored is not None and self.is_integer:
            x[:, LARGEST_EXACT // 2 :] = 0  # sums of products with scales up to 2 stay exact
        scalings = torch.tensor(self.scalings, device="cpu").reshape(ranks.shape)
        # 0 * NaN shows where a kernel multiplies instead of skipping
        scalings = scalings.masked_fill(ranks == 0, float("nan"))
        bias_dtype = torch.float32 if self.wide_bias else self.dtype

        def placed(values: torch.Tensor, pad: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return guarded(values.to(device, dtype), pad, float("nan"))

        def per_slice(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            """Return tensors of different row strides, so that a slice needs its own."""
            return tuple(stack(part, self.weights_pad + s) for s, part in enumerate(parts))

        def stack(values: torch.Tensor, pad: int = self.weights_pad) -> torch.Tensor:
            return self.guarded_stack(values, device, pad)

        scales = column_factors((self.num_slots, out_features), self.seed, self.is_integer)
        weights = LoRAWeights(
            lora_a=per_slice(a.unbind(1)) if "a" in self.split else stack(a),
            lora_b=(
                per_slice(torch.split(b, list(self.output_slices), 1))
                if "b" in self.split
                else stack(b)
            ),
            ranks=ranks.to(device),
            scalings=scalings.to(device),
            output_slices=self.output_slices,
            bias=placed(bias, self.weights_pad, bias_dtype) if self.bias else None,
            output_scales=(
                placed(scales, self.weights_pad, torch.float32) if self.output_scales else None
            ),
            **eight,
        )
        return LoRAInputs(
            x=placed(x, self.x_pad),
            token_ids=token_ids.to(device),
            weights=weights,
            batch=self.batch(),
            base=None if self.base is None else base.to(device, self.base),
            x_pad=self.x_pad,
            base_pad=self.base_pad,
        )

    def edges(self) -> frozenset[str]:
        """Return the names of the edges of `EDGES` that this case covers."""
        return frozenset(name for name, covers in EDGES.items() if covers(self))


def _active(case: LoRACase) -> set[int]:
    return {slot for slot in case.slots if slot != NO_ADAPTER}


def _has_gap(case: LoRACase) -> bool:
    active = _active(case)
    return bool(active) and active != set(range(max(active) + 1))


EDGES: Mapping[str, Callable[[LoRACase], bool]] = {
    "empty batch": lambda case: case.num_tokens == 0,
    "no adapter anywhere": lambda case: case.num_tokens > 0 and not _active(case),
    "one token": lambda case: case.num_tokens == 1,
    "one adapter owns all tokens": lambda case: case.num_tokens > 1 and len(set(case.slots)) == 1,
    "tokens with and without adapter": lambda case: (
        NO_ADAPTER in case.slots and bool(_active(case))
    ),
    "unsorted slots": lambda case: list(case.slots) != sorted(case.slots),
    "gap between slots": _has_gap,
    "tile edge minus one": lambda case: case.num_tokens in (15, 31, 47, 63, 127),
    "tile edge": lambda case: case.num_tokens in (16, 32, 48, 64, 128),
    "tile edge plus one": lambda case: case.num_tokens in (17, 33, 49, 65, 129),
    "rank 0": lambda case: any(0 in case.ranks[slot] for slot in _active(case)),
    "full rank": lambda case: any(case.max_rank in case.ranks[slot] for slot in _active(case)),
    "unequal ranks": lambda case: len({r for slot in _active(case) for r in case.ranks[slot]}) > 1,
    "one slice": lambda case: len(case.output_slices) == 1,
    "equal slices": lambda case: len(case.output_slices) > 1 and len(set(case.output_slices)) == 1,
    "unequal slices": lambda case: len(set(case.output_slices)) > 1,
    "odd widths": lambda case: (
        case.in_features % 2 == 1 and any(width % 2 for width in case.output_slices)
    ),
    "bias": lambda case: case.bias,
    "bias of another dtype": lambda case: (
        case.bias and case.wide_bias and case.dtype != torch.float32
    ),
    "scaling 0": lambda case: any(0.0 in case.scalings[slot] for slot in _active(case)),
    "negative scaling": lambda case: any(min(case.scalings[slot]) < 0 for slot in _active(case)),
    "no base_output": lambda case: case.base is None,
    "base_output of another dtype": lambda case: case.base not in (None, case.dtype),
    "strided x": lambda case: case.x_pad > 0,
    "strided base_output": lambda case: case.base is not None and case.base_pad > 0,
    "strided weights": lambda case: case.weights_pad > 0,
    "scale per token": lambda case: case.token_scales and bool(_active(case)),
    "scale per column": lambda case: case.output_scales and bool(_active(case)),
    "one lora_a per slice": lambda case: "a" in case.split and len(case.output_slices) > 1,
    "one lora_b per slice": lambda case: "b" in case.split and len(case.output_slices) > 1,
    "stacks of int8": lambda case: case.stored == torch.int8 and bool(_active(case)),
    "stacks of float8": lambda case: case.stored not in (None, torch.int8) and bool(_active(case)),
    "scale per block": lambda case: case.stored is not None and case.scale_block != (1, None),
}
"""Name of every edge to the predicate on a case; the report of `verify` counts them."""


def normals(shape: tuple[int, ...], generator: torch.Generator, largest: int = 0) -> torch.Tensor:
    """Return normal values; those of a large tensor repeat after `DRAWN`, as draws take time."""
    count = math.prod(shape)
    if count <= DRAWN:
        return torch.randn(shape, generator=generator, device="cpu")
    return _repeated(torch.randn(DRAWN, generator=generator, device="cpu"), shape)


def _repeated(values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(shape)
    return values.repeat(-(-count // len(values)))[:count].view(shape)


def sparse_normals(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return normal values with at most `FEW` nonzero in a row: the last, others near it, others.

    Tiles are cut off at the end of a row.
    """
    *outer, width = shape
    if width <= FEW:
        return normals(shape, generator)
    index = torch.randint(width, (*outer, FEW), generator=generator, device="cpu")
    ends = index[..., : FEW // 2]
    ends.remainder_(min(width, LARGEST_EXACT // 4)).neg_().add_(width - 1)
    index[..., 0] = width - 1
    values = torch.zeros(shape, device="cpu")
    return values.scatter_(-1, index, normals((*outer, FEW), generator))


def integers(shape: tuple[int, ...], generator: torch.Generator, largest: int = 1) -> torch.Tensor:
    """Return integers from -largest to largest; those of a large tensor repeat, as normals do."""
    few = (min(math.prod(shape), DRAWN),)
    drawn = torch.randint(-largest, largest + 1, few, generator=generator, device="cpu").float()
    return drawn.view(shape) if math.prod(shape) <= DRAWN else _repeated(drawn, shape)


def token_factors(shape: tuple[int, ...], seed: int, integer: bool) -> torch.Tensor:
    """Return scales of a batch, whose draw does not depend on the layer."""
    return _factors(shape, torch.Generator().manual_seed(seed + 1_000_000), integer)


def column_factors(shape: tuple[int, int], seed: int, integer: bool) -> torch.Tensor:
    """Return a scale for each slot and output column."""
    return _factors(shape, torch.Generator().manual_seed(seed + 2_000_000), integer)


def _factors(shape: tuple[int, ...], generator: torch.Generator, integer: bool) -> torch.Tensor:
    """Return small exact numbers, 0 among them; every second one is normal for real values."""
    exact = torch.tensor([1.0, 0.5, -1.0, 0.0], device="cpu")
    chosen = exact[torch.randint(4, shape, generator=generator, device="cpu")]
    drawn = normals(shape, generator)
    normal = torch.rand(shape, generator=generator, device="cpu") < 0.5
    return chosen if integer else torch.where(normal, drawn, chosen)


def base_values(shape: tuple[int, int], generator: torch.Generator, integer: bool) -> torch.Tensor:
    """Return values of base_output: normal, or quarters of eight bits, exact in every dtype."""
    if integer:
        return torch.randint(-128, 129, shape, generator=generator, device="cpu") * 0.25
    return 4 * torch.randn(shape, generator=generator, device="cpu")
